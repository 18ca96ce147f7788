// Sixteen lanes of float or int32, in one AVX-512 register or two AVX2 ones: the only file that names instructions.
//
// Pairs are 16 lanes of two bfloat16 numbers, Quads 16 lanes of four bytes; dot2 and dot4 multiply them lane by lane and
// add the products to a lane's sum. Every function does the same to each lane, whatever the other lanes hold.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace sametoken {

using bf16 = uint16_t;
constexpr int LANES = 16;

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline bf16 to_bf16(float value) {  // nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return bf16((bits >> 16) | 64);  // NaN stays NaN
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void fetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

inline uint32_t dword(const void* at) {
  uint32_t value;
  std::memcpy(&value, at, 4);
  return value;
}

#if defined(__AVX512F__)

using Floats = __m512;
struct Ints { __m512i v; };
struct Pairs { __m512i v; };
struct Quads { __m512i v; };
constexpr int REGISTERS = 32;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats spread(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats greater(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats lesser(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats magnitude(Floats a) { return _mm512_abs_ps(a); }
inline Floats nearest(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats power_of_two(Floats n) {  // 2^n for whole n in the exponents' range
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline Floats load_bf16(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_bf16(bf16* p, Floats x) {  // finite numbers only
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
inline void store_int8(int8_t* p, Floats x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }

inline Ints spread_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats as_floats(Ints x) { return _mm512_cvtepi32_ps(x.v); }

inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Ints bits_of(Floats x) { return {_mm512_castps_si512(x)}; }
inline Floats floats_of(Ints bits) { return _mm512_castsi512_ps(bits.v); }
inline Ints sub_ints(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints mul_ints(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Ints exclusive_or(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N> inline Ints left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline Ints right(Ints a) { return {_mm512_srli_epi32(a.v, N)}; }         // zeros come in
template <int N> inline Ints signed_right(Ints a) { return {_mm512_srai_epi32(a.v, N)}; }  // the sign comes in
inline Floats floor_of(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Floats where_zero(Ints test, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_test_epi32_mask(test.v, test.v), yes, no);
}
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

inline Pairs load_pairs(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs spread_pair(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
inline Floats dot2(Floats sum, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sum, (__m512bh)a.v, (__m512bh)b.v); }
inline Pairs widen_bytes(const void* p) {  // 32 signed bytes as bfloat16
  __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p + 1)));
  return {(__m512i)_mm512_cvtne2ps_pbh(high, low)};
}

inline Quads load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Quads spread_quad(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
inline Ints dot4(Ints sum, Quads u, Quads s) {  // unsigned by signed; gcc copies the sum before every such intrinsic
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(u.v), "v"(s.v));
  return sum;
}
inline Quads low_nibbles(Quads x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Quads high_nibbles(Quads x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }

// out[i * 16 + j] = rows[j][i]: sixteen rows of sixteen 32-bit words, transposed.
inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    _mm512_storeu_si512(out + 16 * i, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + 16 * (i + 8), _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + 16 * (i + 4), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + 16 * (i + 12), _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}

#else  // AVX2 and FMA

struct Floats { __m256 a, b; };
struct Ints { __m256i a, b; };
struct Pairs { __m256i a, b; };
struct Quads { __m256i a, b; };
constexpr int REGISTERS = 16;

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

inline Quads load_quads(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline Quads spread_quad(uint32_t x) { return {_mm256_set1_epi32(int(x)), _mm256_set1_epi32(int(x))}; }
inline __m256i dot4(__m256i sum, __m256i u, __m256i s) {  // not maddubs, whose 16-bit sums saturate
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline Ints dot4(Ints sum, Quads u, Quads s) { return {dot4(sum.a, u.a, s.a), dot4(sum.b, u.b, s.b)}; }
inline __m256i nibbles(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Quads low_nibbles(Quads x) { return {nibbles(x.a), nibbles(x.b)}; }
inline Quads high_nibbles(Quads x) { return {nibbles(_mm256_srli_epi16(x.a, 4)), nibbles(_mm256_srli_epi16(x.b, 4))}; }

inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
  for (int j = 0; j < 16; j++)
    for (int i = 0; i < 16; i++) out[16 * i + j] = rows[j][i];
}

#endif

// Sums and maxima over lanes, in one fixed order.
inline float lane_sum(Floats x) {
  float lanes[LANES];
  store(lanes, x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float lane_max(Floats x) {
  float lanes[LANES], most;
  store(lanes, x);
  most = lanes[0];
  for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// e^x, within 2 units of the last place (Cephes expf); 0 below -87, the greatest float's neighbourhood above 88.
inline Floats exponential(Floats x) {
  x = lesser(greater(x, spread(-87.3f)), spread(88.3f));
  Floats n = nearest(mul(x, spread(1.44269504f)));
  x = fma(n, spread(-0.693359375f), x);
  x = fma(n, spread(2.12194440e-4f), x);
  Floats y = spread(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = fma(y, x, spread(c));
  return mul(add(fma(mul(x, x), y, x), spread(1.0f)), power_of_two(n));
}

}  // namespace sametoken
