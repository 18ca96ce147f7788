// Sixteen lanes in two AVX2 registers. See simd.h.
#pragma once
#include <immintrin.h>

#include "simd_types.h"

namespace sametoken {

struct Floats { __m256 a, b; };
struct Ints { __m256i a, b; };
struct Pairs { __m256i a, b; };
struct Quads { __m256i a, b; };
constexpr int REGISTERS = 16;
constexpr int INT8_OFFSET = 128;

#define SAMETOKEN_EACH(NAME, OP) \
  inline Floats NAME(Floats x, Floats y) { return {OP(x.a, y.a), OP(x.b, y.b)}; }
SAMETOKEN_EACH(add, _mm256_add_ps)
SAMETOKEN_EACH(sub, _mm256_sub_ps)
SAMETOKEN_EACH(mul, _mm256_mul_ps)
SAMETOKEN_EACH(divide, _mm256_div_ps)
SAMETOKEN_EACH(greater, _mm256_max_ps)
SAMETOKEN_EACH(lesser, _mm256_min_ps)
#undef SAMETOKEN_EACH
inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline Floats fma(Floats x, Floats y, Floats z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline Floats magnitude(Floats x) {
  __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline Floats nearest(Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Floats power_of_two(Floats n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline __m256 wide(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Floats load_bf16(const bf16* p) { return {wide(p), wide(p + 8)}; }
inline void store_bf16(bf16* p, Floats x) {  // finite numbers only
  float lanes[LANES];
  store(lanes, x);
  for (int i = 0; i < LANES; i++) p[i] = to_bf16(lanes[i]);
}
inline void store_int8(int8_t* p, Floats x) {
  int32_t lanes[LANES];
  _mm256_storeu_si256((__m256i*)lanes, _mm256_cvtps_epi32(x.a));
  _mm256_storeu_si256((__m256i*)(lanes + 8), _mm256_cvtps_epi32(x.b));
  for (int i = 0; i < LANES; i++) p[i] = int8_t(lanes[i]);
}

inline Ints spread_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats as_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

inline Ints load_ints(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline Ints bits_of(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline Floats floats_of(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Ints add_ints(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints sub_ints(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Ints mul_ints(Ints x, Ints y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline Ints exclusive_or(Ints x, Ints y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N> inline Ints left(Ints x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> inline Ints right(Ints x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N> inline Ints signed_right(Ints x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
inline Floats floor_of(Floats x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
inline __m256 where_zero(__m256i test, __m256 yes, __m256 no) {
  return _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(_mm256_cmpeq_epi32(test, _mm256_setzero_si256())));
}
inline Floats where_zero(Ints test, Floats yes, Floats no) {
  return {where_zero(test.a, yes.a, no.a), where_zero(test.b, yes.b, no.b)};
}
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}

inline Pairs load_pairs(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Pairs spread_pair(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline __m256 first(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline __m256 second(__m256i x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000)))); }
inline __m256 dot2(__m256 sum, __m256i a, __m256i b) {
  return _mm256_fmadd_ps(second(a), second(b), _mm256_fmadd_ps(first(a), first(b), sum));
}
inline Floats dot2(Floats sum, Pairs a, Pairs b) { return {dot2(sum.a, a.a, b.a), dot2(sum.b, a.b, b.b)}; }
inline __m256i widen_half(const void* p) {  // 16 signed bytes as bfloat16; eight significant bits hold them exactly
  __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
  __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)p + 8)));
  low = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(low)), 16);
  high = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(high)), 16);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}
inline Pairs widen_bytes(const void* p) { return {widen_half(p), widen_half((const char*)p + 16)}; }

// Codes of other tools. Pairs hold them as 32 numbers of 16 bits, or 64 bytes, on the way.
#define SAMETOKEN_HALVES(NAME, OP) \
  inline Pairs NAME(Pairs x, Pairs y) { return {OP(x.a, y.a), OP(x.b, y.b)}; }
SAMETOKEN_HALVES(sub_int16, _mm256_sub_epi16)
SAMETOKEN_HALVES(sub_bytes, _mm256_sub_epi8)
#undef SAMETOKEN_HALVES
inline Pairs int16_of_bytes(const void* p) {
  const __m128i* at = (const __m128i*)p;
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
}
inline __m256i nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Pairs low_nibble_bytes(Pairs x) { return {nibbles(x.a), nibbles(x.b)}; }
template <int N> inline Pairs right_int16(Pairs x) { return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)}; }
inline __m256i twice(__m256i x) { return _mm256_blend_epi16(x, _mm256_slli_epi32(x, 16), 0xaa); }
inline Pairs twice_int16(const int8_t* p) {  // 16 signed bytes, each in both halves of its lane
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {twice(_mm256_cvtepi8_epi32(x)), twice(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline Pairs four_times(const int8_t* p) {  // 16 bytes, each in all four bytes of its lane
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  __m256i times = _mm256_set1_epi32(0x01010101);
  return {_mm256_mullo_epi32(_mm256_cvtepu8_epi32(x), times), _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)), times)};
}
inline __m256i joined(__m256 low, __m256 high) {  // the upper halves of two vectors of floats
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(low), 16), _mm256_castps_si256(high), 0xaa);
}
template <int N> inline __m256 part(__m256i x) {  // as a float, the signed byte that ends below bit N of each lane
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 32 - N), 24));
}
inline __m256i of_int16(__m256i x) {
  __m256 low = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16));
  return joined(low, _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 16)));
}
inline Pairs pairs_of_int16(Pairs x) { return {of_int16(x.a), of_int16(x.b)}; }  // of at most 8 significant bits
template <int BYTE> inline Pairs small_bytes(Pairs x) {  // from one signed byte of each 16 bits
  return {joined(part<8 * BYTE + 8>(x.a), part<8 * BYTE + 24>(x.a)), joined(part<8 * BYTE + 8>(x.b), part<8 * BYTE + 24>(x.b))};
}
struct Table { __m256i upper, lower; };  // bytes of 16 numbers, twice
inline Table table_of(const uint16_t (&values)[16]) {
  __m128i first = _mm_loadu_si128((const __m128i*)values), last = _mm_loadu_si128((const __m128i*)values + 1);
  __m128i mask = _mm_set1_epi16(255);
  __m128i upper = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(last, 8));
  __m128i lower = _mm_packus_epi16(_mm_and_si128(first, mask), _mm_and_si128(last, mask));
  return {_mm256_broadcastsi128_si256(upper), _mm256_broadcastsi128_si256(lower)};
}
inline __m256i looked_up(const Table& table, __m256i x) {
  x = _mm256_and_si256(x, _mm256_set1_epi16(15));
  return _mm256_or_si256(_mm256_slli_epi16(_mm256_shuffle_epi8(table.upper, x), 8), _mm256_shuffle_epi8(table.lower, x));
}
inline Pairs looked_up(const Table& table, Pairs x) { return {looked_up(table, x.a), looked_up(table, x.b)}; }  // by each low four bits
inline bool has_tiny_fp8(Pairs x) {  // exponents of 0
  __m256i mask = _mm256_set1_epi8(0x78), zero = _mm256_setzero_si256();
  __m256i a = _mm256_cmpeq_epi8(_mm256_and_si256(x.a, mask), zero), b = _mm256_cmpeq_epi8(_mm256_and_si256(x.b, mask), zero);
  return _mm256_movemask_epi8(_mm256_or_si256(a, b)) != 0;
}
inline void store_pairs(void* p, Pairs x) { _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b); }
inline __m256i normal_fp8(__m256i x) {  // the upper byte of each 16 bits
  __m256i bits = _mm256_and_si256(_mm256_srai_epi16(x, 4), _mm256_set1_epi16(short(0x87f0)));
  return _mm256_add_epi16(bits, _mm256_set1_epi16(120 << 7));
}
template <int BYTE> inline __m256i upper_byte(__m256i x) { return BYTE == 0 ? _mm256_slli_epi16(x, 8) : x; }
template <int BYTE> inline Pairs normal_fp8(Pairs x) {  // one byte of each 16 bits
  return {normal_fp8(upper_byte<BYTE>(x.a)), normal_fp8(upper_byte<BYTE>(x.b))};
}
inline __m256i any_fp8(__m256i x) {  // tiny numbers are 0 .. 7 times 2^-9
  const __m256i upper = _mm256_set1_epi64x(0x3c3c3c3c3b3b3b00), lower = _mm256_set1_epi64x(0x60402000c0800000);
  __m256i size = _mm256_and_si256(_mm256_srli_epi16(x, 8), _mm256_set1_epi16(127));
  __m256i tiny = _mm256_or_si256(_mm256_slli_epi16(_mm256_shuffle_epi8(upper, size), 8), _mm256_shuffle_epi8(lower, size));
  tiny = _mm256_or_si256(tiny, _mm256_and_si256(x, _mm256_set1_epi16(short(0x8000))));
  return _mm256_blendv_epi8(normal_fp8(x), tiny, _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size));
}
template <int BYTE> inline Pairs any_fp8(Pairs x) { return {any_fp8(upper_byte<BYTE>(x.a)), any_fp8(upper_byte<BYTE>(x.b))}; }
inline Ints load_bytes(const uint8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}

inline Quads load_quads(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Quads load_int8(const void* p) { return load_quads(p); }
inline Quads spread_quad(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline __m256i made(__m256i x) {  // gcc would put off sums to a loop's end, and keep all products until then
  asm("" : "+x"(x));
  return x;
}
struct SplitQuad { __m256i even, odd; };  // the same four bytes in each lane, as numbers of 16 bits
constexpr int SPLIT_WORDS = 2;
inline uint32_t split_word(uint32_t bytes, int word) {
  uint32_t x = bytes >> 8 * word;
  return uint16_t(int8_t(x)) | uint32_t(int8_t(x >> 16)) << 16;
}
inline SplitQuad spread_split(const uint32_t* x, int stride) { return {_mm256_set1_epi32(int(x[0])), _mm256_set1_epi32(int(x[stride]))}; }
inline __m256i dot4(__m256i sum, __m256i u, SplitQuad s) {  // not maddubs, whose 16-bit sums saturate
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), s.even);
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), s.odd);
  return made(_mm256_add_epi32(sum, _mm256_add_epi32(even, odd)));
}
inline Ints dot4(Ints sum, Quads u, SplitQuad s) { return {dot4(sum.a, u.a, s), dot4(sum.b, u.b, s)}; }
// Of Terms in simd.h, gathered in 16 bits.
template <int BITS>
class SmallTerms {
 public:
  static constexpr int MOST = 32767 / (2 * 127 * ((1 << BITS) - 1));
  void begin(Ints) { pairs_ = {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  void add(Quads u, Quads s) {
    pairs_.a = made(_mm256_add_epi16(pairs_.a, _mm256_maddubs_epi16(u.a, s.a)));
    pairs_.b = made(_mm256_add_epi16(pairs_.b, _mm256_maddubs_epi16(u.b, s.b)));
  }
  Ints total(Ints sum) const {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(pairs_.a, ones)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(pairs_.b, ones))};
  }

 private:
  Pairs pairs_;
};
inline Quads low_nibbles(Quads x) { return {nibbles(x.a), nibbles(x.b)}; }
inline Quads high_nibbles(Quads x) { return {nibbles(_mm256_srli_epi16(x.a, 4)), nibbles(_mm256_srli_epi16(x.b, 4))}; }

template <int LEFT> inline __m256i insert_bits(__m256i x, __m256i y, char mask) {
  __m256i moved = LEFT >= 0 ? _mm256_slli_epi16(y, LEFT > 0 ? LEFT : 0) : _mm256_srli_epi16(y, LEFT < 0 ? -LEFT : 0);
  return _mm256_or_si256(x, _mm256_and_si256(moved, _mm256_set1_epi8(mask)));
}
template <int LEFT> inline Quads insert_bits(Quads x, Quads y, char mask) {  // x with those bits of y, moved within 16 bits
  return {insert_bits<LEFT>(x.a, y.a, mask), insert_bits<LEFT>(x.b, y.b, mask)};
}

inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
  for (int j = 0; j < 16; j++)
    for (int i = 0; i < 16; i++) out[16 * i + j] = rows[j][i];
}

}  // namespace sametoken
