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

// Codes of other tools. Pairs hold them as 32 numbers of 16 bits on the way.
inline Pairs int16_of_bytes(const void* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
inline Pairs sub_int16(Pairs a, Pairs b) { return {_mm512_sub_epi16(a.v, b.v)}; }
inline Pairs low_int16(Pairs a) { return {_mm512_and_si512(a.v, _mm512_set1_epi16(15))}; }
template <int N> inline Pairs right_int16(Pairs a) { return {_mm512_srli_epi16(a.v, N)}; }
inline Pairs twice_int16(const int8_t* p) {  // 16 signed bytes, each in both halves of its lane
  __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(x, 16))};
}
inline Pairs pairs_of_int16(Pairs a) {  // of at most 8 significant bits
  __m512i low = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.v, 16), 16)));
  __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_srai_epi32(a.v, 16)));
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high)};
}
inline Pairs looked_up(const uint16_t (&table)[32], Pairs a) {  // by the low five bits
  return {_mm512_permutexvar_epi16(a.v, _mm512_loadu_si512(table))};
}
inline Pairs pairs_of_small(Pairs a) { return looked_up(SMALL_INTS, a); }  // -16 .. 15
inline Pairs pairs_of_fp4(Pairs a) { return looked_up(FP4_VALUES, a); }    // of each low four bits
inline void store_pairs(void* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
inline Pairs low_bytes(Pairs a) { return {_mm512_and_si512(a.v, _mm512_set1_epi16(255))}; }
inline Pairs fp8_of_int16(Pairs a) {  // codes of 8 bits
  __m512i x = a.v;
  __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(127)), 4), _mm512_set1_epi16(120 << 7));
  __mmask32 tiny = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
  bits = _mm512_mask_permutexvar_epi16(bits, tiny, x, _mm512_loadu_si512(FP8_TINY));
  return {_mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(x, 8), _mm512_set1_epi16(-32768), 0xf8)};  // a | (b & c)
}
inline Pairs pairs_of_fp8(const void* p) { return fp8_of_int16({_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p))}); }
inline Ints load_bytes(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }

inline Quads load_quads(const void* p) { return {_mm512_loadu_si512(p)}; }
inline Quads load_int8(const void* p) { return load_quads(p); }
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

}  // namespace sametoken
