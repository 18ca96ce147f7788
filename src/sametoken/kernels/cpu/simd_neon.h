// Sixteen lanes in four NEON registers of arm64, with its dot products of bytes and of bfloat16 where they are allowed.
//
// Without the dot product of bfloat16 every operation is the one that simd_avx2.h does, so the bits are the same too.
#pragma once
#include <arm_neon.h>

#include "simd_types.h"

namespace sametoken {

template <class T>
struct Four { T a, b, c, d; };
using Floats = Four<float32x4_t>;
using Ints = Four<int32x4_t>;
using Pairs = Four<uint32x4_t>;
using Quads = Four<int8x16_t>;
constexpr int REGISTERS = 16;   // of AVX2's eight lanes: as many sums fit as there
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int INT8_OFFSET = 128;
#else
constexpr int INT8_OFFSET = 0;  // load_int8 makes bytes signed: older products take two of a kind
#endif

// f of each register of some vectors.
template <class F, class... X>
inline auto each(F f, const X&... x) {
  return Four<decltype(f(x.a...))>{f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}
template <class T>
inline Four<T> same(T x) { return {x, x, x, x}; }
inline uint32x4_t word_at(const void* p, int i) { return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i)); }
inline Pairs words_at(const void* p) { return {word_at(p, 0), word_at(p, 1), word_at(p, 2), word_at(p, 3)}; }

inline Floats zeros() { return same(vdupq_n_f32(0)); }
inline Floats spread(float x) { return same(vdupq_n_f32(x)); }
inline Floats load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, const Floats& x) {
  vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
#define SAMETOKEN_EACH(TYPE, NAME, OP) \
  inline TYPE NAME(const TYPE& x, const TYPE& y) { return each([](auto p, auto q) { return OP(p, q); }, x, y); }
SAMETOKEN_EACH(Floats, add, vaddq_f32)
SAMETOKEN_EACH(Floats, sub, vsubq_f32)
SAMETOKEN_EACH(Floats, mul, vmulq_f32)
SAMETOKEN_EACH(Floats, divide, vdivq_f32)
SAMETOKEN_EACH(Ints, add_ints, vaddq_s32)
SAMETOKEN_EACH(Ints, sub_ints, vsubq_s32)
SAMETOKEN_EACH(Ints, mul_ints, vmulq_s32)
SAMETOKEN_EACH(Ints, exclusive_or, veorq_s32)
#undef SAMETOKEN_EACH
inline Floats fma(const Floats& x, const Floats& y, const Floats& z) {
  return each([](auto p, auto q, auto r) { return vfmaq_f32(r, p, q); }, x, y, z);
}
// The second number where one is NaN, as on x86; vmaxq and vminq would give NaN.
inline Floats greater(const Floats& x, const Floats& y) {
  return each([](auto p, auto q) { return vbslq_f32(vcgtq_f32(p, q), p, q); }, x, y);
}
inline Floats lesser(const Floats& x, const Floats& y) {
  return each([](auto p, auto q) { return vbslq_f32(vcltq_f32(p, q), p, q); }, x, y);
}
inline Floats magnitude(const Floats& x) { return each([](auto p) { return vabsq_f32(p); }, x); }
inline Floats nearest(const Floats& x) { return each([](auto p) { return vrndnq_f32(p); }, x); }
inline Floats floor_of(const Floats& x) { return each([](auto p) { return vrndmq_f32(p); }, x); }
inline Floats power_of_two(const Floats& n) {  // 2^n for whole n in the exponents' range
  auto f = [](auto p) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(p), vdupq_n_s32(127)), 23)); };
  return each(f, n);
}

inline float32x4_t wide(const bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Floats load_bf16(const bf16* p) { return {wide(p), wide(p + 4), wide(p + 8), wide(p + 12)}; }
inline uint16x4_t rounded(float32x4_t x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}
inline void store_bf16(bf16* p, const Floats& x) {  // finite numbers only
  vst1_u16(p, rounded(x.a)), vst1_u16(p + 4, rounded(x.b)), vst1_u16(p + 8, rounded(x.c)), vst1_u16(p + 12, rounded(x.d));
}
inline void store_int8(int8_t* p, const Floats& x) {
  auto half = [](float32x4_t low, float32x4_t high) {
    return vmovn_s16(vcombine_s16(vmovn_s32(vcvtnq_s32_f32(low)), vmovn_s32(vcvtnq_s32_f32(high))));
  };
  vst1_s8(p, half(x.a, x.b)), vst1_s8(p + 8, half(x.c, x.d));
}

inline Ints spread_int(int32_t x) { return same(vdupq_n_s32(x)); }
inline Floats as_floats(const Ints& x) { return each([](auto p) { return vcvtq_f32_s32(p); }, x); }
inline Ints load_ints(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
inline Ints bits_of(const Floats& x) { return each([](auto p) { return vreinterpretq_s32_f32(p); }, x); }
inline Floats floats_of(const Ints& x) { return each([](auto p) { return vreinterpretq_f32_s32(p); }, x); }
template <int N>
inline Ints left(const Ints& x) { return each([](auto p) { return vshlq_n_s32(p, N); }, x); }
template <int N>
inline Ints right(const Ints& x) {  // zeros come in
  return each([](auto p) { return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(p), N)); }, x);
}
template <int N>
inline Ints signed_right(const Ints& x) { return each([](auto p) { return vshrq_n_s32(p, N); }, x); }
inline Floats where_zero(const Ints& test, const Floats& yes, const Floats& no) {
  return each([](auto t, auto p, auto q) { return vbslq_f32(vceqzq_s32(t), p, q); }, test, yes, no);
}
inline Floats where_less(const Floats& a, const Floats& b, const Floats& yes, const Floats& no) {
  return each([](auto x, auto y, auto p, auto q) { return vbslq_f32(vcltq_f32(x, y), p, q); }, a, b, yes, no);
}

inline Pairs load_pairs(const void* p) { return words_at(p); }
inline Pairs spread_pair(uint32_t x) { return same(vdupq_n_u32(x)); }
inline float32x4_t dot2(float32x4_t sum, uint32x4_t a, uint32x4_t b) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
#else
  auto first = [](uint32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(x, 16)); };
  auto second = [](uint32x4_t x) { return vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000))); };
  return vfmaq_f32(vfmaq_f32(sum, first(a), first(b)), second(a), second(b));
#endif
}
inline Floats dot2(const Floats& sum, const Pairs& a, const Pairs& b) {
  return each([](auto s, auto p, auto q) { return dot2(s, p, q); }, sum, a, b);
}
inline uint32x4_t widen_part(const void* p, int i) {  // 8 signed bytes as bfloat16; eight significant bits hold them exactly
  int16x8_t x = vmovl_s8(vld1_s8(static_cast<const int8_t*>(p) + 8 * i));
  float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), high = vcvtq_f32_s32(vmovl_high_s16(x));
  return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
}
inline Pairs widen_bytes(const void* p) { return {widen_part(p, 0), widen_part(p, 1), widen_part(p, 2), widen_part(p, 3)}; }

// Codes of other tools. Pairs hold them as 32 numbers of 16 bits, or 64 bytes, on the way.
inline uint32x4_t of_int16s(int16x8_t x) { return vreinterpretq_u32_s16(x); }
inline int16x8_t int16s(uint32x4_t x) { return vreinterpretq_s16_u32(x); }
inline uint32x4_t of_bytes(uint8x16_t x) { return vreinterpretq_u32_u8(x); }
inline uint8x16_t bytes(uint32x4_t x) { return vreinterpretq_u8_u32(x); }
inline uint32x4_t bytes_part(const void* p, int i) { return of_int16s(vmovl_s8(vld1_s8(static_cast<const int8_t*>(p) + 8 * i))); }
inline Pairs int16_of_bytes(const void* p) { return {bytes_part(p, 0), bytes_part(p, 1), bytes_part(p, 2), bytes_part(p, 3)}; }
inline Pairs sub_int16(const Pairs& x, const Pairs& y) {
  return each([](auto p, auto q) { return of_int16s(vsubq_s16(int16s(p), int16s(q))); }, x, y);
}
inline Pairs sub_bytes(const Pairs& x, const Pairs& y) {
  return each([](auto p, auto q) { return of_bytes(vsubq_u8(bytes(p), bytes(q))); }, x, y);
}
inline Pairs low_nibble_bytes(const Pairs& x) { return each([](auto p) { return vandq_u32(p, vdupq_n_u32(0x0f0f0f0f)); }, x); }
template <int N>
inline Pairs right_int16(const Pairs& x) {
  if constexpr (N == 0) return x;
  else return each([](auto p) { return vreinterpretq_u32_u16(vshrq_n_u16(vreinterpretq_u16_u32(p), N)); }, x);
}
inline uint32x4_t twice(int16x4_t x) { return of_int16s(vcombine_s16(vzip1_s16(x, x), vzip2_s16(x, x))); }
inline Pairs twice_int16(const int8_t* p) {  // 16 signed bytes, each in both halves of its lane
  int16x8_t low = vmovl_s8(vld1_s8(p)), high = vmovl_s8(vld1_s8(p + 8));
  return {twice(vget_low_s16(low)), twice(vget_high_s16(low)), twice(vget_low_s16(high)), twice(vget_high_s16(high))};
}
inline Pairs four_times(const int8_t* p) {  // 16 bytes, each in all four bytes of its lane
  int8x16_t x = vld1q_s8(p);
  int16x8_t low = vreinterpretq_s16_s8(vzip1q_s8(x, x)), high = vreinterpretq_s16_s8(vzip2q_s8(x, x));
  return {twice(vget_low_s16(low)), twice(vget_high_s16(low)), twice(vget_low_s16(high)), twice(vget_high_s16(high))};
}
inline uint32x4_t joined(float32x4_t low, float32x4_t high) {  // the upper halves of two vectors of floats
  uint32x4_t upper = vandq_u32(vreinterpretq_u32_f32(high), vdupq_n_u32(0xffff0000));
  return vorrq_u32(vshrq_n_u32(vreinterpretq_u32_f32(low), 16), upper);
}
inline uint32x4_t of_int16(uint32x4_t x) {  // of at most 8 significant bits
  int32x4_t y = vreinterpretq_s32_u32(x);
  return joined(vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(y, 16), 16)), vcvtq_f32_s32(vshrq_n_s32(y, 16)));
}
inline Pairs pairs_of_int16(const Pairs& x) { return each([](auto p) { return of_int16(p); }, x); }
template <int BYTE>
inline int16x8_t upper_byte(uint32x4_t x) { return BYTE == 0 ? vshlq_n_s16(int16s(x), 8) : int16s(x); }
template <int BYTE>
inline Pairs small_bytes(const Pairs& x) {  // from one signed byte of each 16 bits
  return each([](auto p) { return of_int16(of_int16s(vshrq_n_s16(upper_byte<BYTE>(p), 8))); }, x);
}
struct Table { uint8x16_t upper, lower; };  // bytes of 16 numbers
inline Table table_of(const uint16_t (&values)[16]) {
  uint8x16_t first = vreinterpretq_u8_u16(vld1q_u16(values)), last = vreinterpretq_u8_u16(vld1q_u16(values + 8));
  return {vuzp2q_u8(first, last), vuzp1q_u8(first, last)};
}
inline uint32x4_t numbers_of(const Table& table, uint32x4_t at) {  // by the lower byte of each 16 bits
  uint16x8_t high = vshlq_n_u16(vreinterpretq_u16_u8(vqtbl1q_u8(table.upper, bytes(at))), 8);
  return vorrq_u32(vreinterpretq_u32_u16(high), of_bytes(vqtbl1q_u8(table.lower, bytes(at))));
}
inline Pairs looked_up(const Table& table, const Pairs& x) {  // by each low four bits
  return each([&](auto p) { return numbers_of(table, vandq_u32(p, vdupq_n_u32(0x000f000f))); }, x);
}
inline bool has_tiny_fp8(const Pairs& x) {  // exponents of 0
  auto exponents = [](auto p) { return vandq_u8(bytes(p), vdupq_n_u8(0x78)); };
  uint8x16_t least = vminq_u8(vminq_u8(exponents(x.a), exponents(x.b)), vminq_u8(exponents(x.c), exponents(x.d)));
  return vminvq_u8(least) == 0;
}
inline uint32x4_t normal_fp8(int16x8_t x) {  // the upper byte of each 16 bits
  return of_int16s(vaddq_s16(int16s(vandq_u32(of_int16s(vshrq_n_s16(x, 4)), vdupq_n_u32(0x87f087f0))), vdupq_n_s16(120 << 7)));
}
template <int BYTE>
inline Pairs normal_fp8(const Pairs& x) {  // one byte of each 16 bits
  return each([](auto p) { return normal_fp8(upper_byte<BYTE>(p)); }, x);
}
template <int BYTE>
inline Pairs any_fp8(const Pairs& x) {  // tiny numbers are 0 .. 7 times 2^-9
  static constexpr uint16_t TINY[16] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  Table table = table_of(TINY);
  return each([=](auto p) {
    int16x8_t upper = upper_byte<BYTE>(p);
    uint16x8_t size = vandq_u16(vshrq_n_u16(vreinterpretq_u16_s16(upper), 8), vdupq_n_u16(127));
    uint32x4_t sign = vandq_u32(of_int16s(upper), vdupq_n_u32(0x80008000));
    uint16x8_t tiny = vreinterpretq_u16_u32(vorrq_u32(numbers_of(table, vreinterpretq_u32_u16(size)), sign));
    return vreinterpretq_u32_u16(vbslq_u16(vcltq_u16(size, vdupq_n_u16(8)), tiny, vreinterpretq_u16_u32(normal_fp8(upper))));
  }, x);
}
inline void store_pairs(void* p, const Pairs& x) {
  uint32_t* to = static_cast<uint32_t*>(p);
  vst1q_u32(to, x.a), vst1q_u32(to + 4, x.b), vst1q_u32(to + 8, x.c), vst1q_u32(to + 12, x.d);
}
inline Ints load_bytes(const uint8_t* p) {
  uint16x8_t low = vmovl_u8(vld1_u8(p)), high = vmovl_u8(vld1_u8(p + 8));
  auto wider = [](uint16x4_t x) { return vreinterpretq_s32_u32(vmovl_u16(x)); };
  return {wider(vget_low_u16(low)), wider(vget_high_u16(low)), wider(vget_low_u16(high)), wider(vget_high_u16(high))};
}

inline Quads load_quads(const void* p) { return each([](auto x) { return vreinterpretq_s8_u32(x); }, words_at(p)); }
inline Quads load_int8(const void* p) {
  return each([](auto x) { return INT8_OFFSET == 128 ? x : veorq_s8(x, vdupq_n_s8(-128)); }, load_quads(p));
}
inline Quads spread_quad(uint32_t x) { return same(vreinterpretq_s8_u32(vdupq_n_u32(x))); }
inline int32x4_t dot4(int32x4_t sum, int8x16_t a, int8x16_t b) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vusdotq_s32(sum, vreinterpretq_u8_s8(a), b);
#elif defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, a, b);
#else  // rows have no -128, so the sum of two products fits 16 bits
  return vpadalq_s16(sum, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
#endif
}
inline Ints dot4(const Ints& sum, const Quads& a, const Quads& b) {
  return each([](auto s, auto p, auto q) { return dot4(s, p, q); }, sum, a, b);
}
inline Quads low_nibbles(const Quads& x) { return each([](auto p) { return vandq_s8(p, vdupq_n_s8(15)); }, x); }
inline Quads high_nibbles(const Quads& x) {
  return each([](auto p) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(p), 4)); }, x);
}
template <int LEFT>
inline Quads insert_bits(const Quads& x, const Quads& y, char mask) {  // x with those bits of y, moved within bytes
  return each([=](auto p, auto q) {
    uint8x16_t bits = vreinterpretq_u8_s8(q);
    if constexpr (LEFT > 0) bits = vshlq_n_u8(bits, LEFT);
    if constexpr (LEFT < 0) bits = vshrq_n_u8(bits, -LEFT);
    return vorrq_s8(p, vandq_s8(vreinterpretq_s8_u8(bits), vdupq_n_s8(int8_t(mask))));
  }, x, y);
}

// out[i * 16 + j] = rows[j][i]: sixteen rows of sixteen 32-bit words, transposed four by four.
inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
  for (int j = 0; j < 16; j += 4)
    for (int i = 0; i < 16; i += 4) {
      uint32x4_t a = vld1q_u32(rows[j] + i), b = vld1q_u32(rows[j + 1] + i);
      uint32x4_t c = vld1q_u32(rows[j + 2] + i), d = vld1q_u32(rows[j + 3] + i);
      uint32x4_t ac = vzip1q_u32(a, c), bd = vzip1q_u32(b, d), more_ac = vzip2q_u32(a, c), more_bd = vzip2q_u32(b, d);
      vst1q_u32(out + 16 * i + j, vzip1q_u32(ac, bd));
      vst1q_u32(out + 16 * (i + 1) + j, vzip2q_u32(ac, bd));
      vst1q_u32(out + 16 * (i + 2) + j, vzip1q_u32(more_ac, more_bd));
      vst1q_u32(out + 16 * (i + 3) + j, vzip2q_u32(more_ac, more_bd));
    }
}

}  // namespace sametoken
