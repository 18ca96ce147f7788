// Sixteen lanes in one AVX-512 register. See simd.h.
#pragma once
#include <immintrin.h>

#include "simd_types.h"

namespace sametoken {

using Floats = __m512;
struct Ints { __m512i v; };
struct Pairs { __m512i v; };
struct Quads { __m512i v; };
constexpr int REGISTERS = 32;
constexpr int INT8_OFFSET = 128;

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
inline Ints add_ints(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
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

// Codes of other tools. Pairs hold them as 32 numbers of 16 bits, or 64 bytes, on the way.
inline Pairs int16_of_bytes(const void* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
inline Pairs sub_int16(Pairs a, Pairs b) { return {_mm512_sub_epi16(a.v, b.v)}; }
inline Pairs sub_bytes(Pairs a, Pairs b) { return {_mm512_sub_epi8(a.v, b.v)}; }
inline Pairs low_nibble_bytes(Pairs a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
template <int N> inline Pairs right_int16(Pairs a) { return {N == 0 ? a.v : _mm512_srli_epi16(a.v, N)}; }
inline Pairs twice_int16(const int8_t* p) {  // 16 signed bytes, each in both halves of its lane
  __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(x, 16))};
}
inline Pairs four_times(const int8_t* p) {  // 16 bytes, each in all four bytes of its lane
  __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_shuffle_epi8(x, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0))};
}
inline Pairs pairs_of_int16(Pairs a) {  // of at most 8 significant bits
  __m512i low = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.v, 16), 16)));
  __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(a.v, 16)));
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high)};
}
struct Table { __m512i v; };
inline Table table_of(const uint16_t (&values)[16]) { return {_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)values))}; }
inline Pairs looked_up(Table table, Pairs a) { return {_mm512_permutexvar_epi16(a.v, table.v)}; }  // by each low four bits
template <int BYTE> inline Pairs small_bytes(Pairs a) {  // -16 .. 15, from one byte of each 16 bits
  return {_mm512_permutexvar_epi16(right_int16<8 * BYTE>(a).v, _mm512_loadu_si512(SIGNED_INTS))};
}
inline void store_pairs(void* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
inline bool has_tiny_fp8(Pairs a) { return _mm512_testn_epi8_mask(a.v, _mm512_set1_epi8(0x78)) != 0; }  // exponents of 0
template <int BYTE> inline Pairs normal_fp8(Pairs a) {  // one byte of each 16 bits
  __m512i bits = _mm512_srai_epi16(BYTE == 0 ? _mm512_slli_epi16(a.v, 8) : a.v, 4);
  return {_mm512_add_epi16(_mm512_and_si512(bits, _mm512_set1_epi16(short(0x87f0))), _mm512_set1_epi16(120 << 7))};
}
template <int BYTE> inline Pairs any_fp8(Pairs a) {
  alignas(64) static constexpr uint16_t TINY[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  __m512i bits = normal_fp8<BYTE>(a).v, sign = _mm512_and_si512(bits, _mm512_set1_epi16(short(0x8000)));
  __mmask32 tiny = _mm512_testn_epi16_mask(a.v, _mm512_set1_epi16(short(0x78 << 8 * BYTE)));
  __m512i value = _mm512_permutexvar_epi16(right_int16<8 * BYTE>(a).v, _mm512_load_si512(TINY));
  return {_mm512_or_si512(_mm512_mask_mov_epi16(bits, tiny, value), sign)};
}
inline Ints load_bytes(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline Floats load_signed(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Floats load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Floats load_signed_fp8(const uint8_t* p) {  // none of them NaN
  __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  x = _mm256_and_si256(x, _mm256_set1_epi16(int16_t(0xbfff)));
  return _mm512_mul_ps(_mm512_cvtph_ps(x), _mm512_set1_ps(256));
}
inline Floats load_fp8(const uint8_t* p) {  // none of them negative or NaN
  __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(x, 7)), _mm512_set1_ps(256));
}

inline Quads load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Quads load_int8(const void* p) { return load_quads(p); }
inline Quads spread_quad(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
inline Ints dot4(Ints sum, Quads u, Quads s) {  // unsigned by signed; gcc copies the sum before every such intrinsic
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(u.v), "v"(s.v));
  return sum;
}
inline Quads low_nibbles(Quads x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Quads high_nibbles(Quads x) { return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))}; }
template <int LEFT> inline Quads insert_bits(Quads x, Quads y, char mask) {  // x with those bits of y, moved within 16 bits
  __m512i moved = LEFT >= 0 ? _mm512_slli_epi16(y.v, LEFT > 0 ? LEFT : 0) : _mm512_srli_epi16(y.v, LEFT < 0 ? -LEFT : 0);
  return {_mm512_or_si512(x.v, _mm512_and_si512(moved, _mm512_set1_epi8(mask)))};
}

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

}  // namespace sametoken
