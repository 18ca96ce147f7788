// Sixteen lanes of float or int32 in the registers of one set of instructions, which only the simd_*.h files name.
//
// Pairs are 16 lanes of two bfloat16 numbers, Quads 16 lanes of four bytes. dot2 multiplies Pairs, dot4 Quads by a SplitQuad,
// lane by lane, and both add the products to a lane's sum. Every function does the same to each lane, whatever the other
// lanes hold.
// INT8_OFFSET is by how much a byte that load_int8 gives exceeds the weight that it stands for; in memory that is 128.
#pragma once
#include <initializer_list>

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "these kernels need AVX2 and FMA, or an arm64 processor"
#endif

namespace sametoken {

inline void fetch(const void* at) { __builtin_prefetch(at); }

// The same into the second-level cache, which many lines may be on their way to. Without the empty assembly gcc takes a
// function that only calls this for one without effects, and leaves its calls out.
inline void fetch_early(const void* at) {
  __builtin_prefetch(at, 0, 2);
  asm volatile("");
}

// Tells the core that this thread waits for another one.
inline void relax() {
#if defined(__aarch64__)
  asm volatile("isb");  // yield does nothing on most cores; this takes about as long as x86's pause
#else
  _mm_pause();
#endif
}

// Four rows of four words, `from_stride` words apart, as columns, `to_stride` words apart.
inline void transpose4(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  auto source = [&](int i) { return static_cast<const char*>(from) + 4 * from_stride * i; };
  auto target = [&](int i) { return static_cast<char*>(to) + 4 * to_stride * i; };
#if defined(__aarch64__)
  auto row = [&](int i) { return vld1q_u32(reinterpret_cast<const uint32_t*>(source(i))); };
  uint32x4x2_t first = vzipq_u32(row(0), row(2)), second = vzipq_u32(row(1), row(3));
  for (int half = 0; half < 2; half++) {
    uint32x4x2_t columns = vzipq_u32(first.val[half], second.val[half]);
    for (int i = 0; i < 2; i++) vst1q_u32(reinterpret_cast<uint32_t*>(target(2 * half + i)), columns.val[i]);
  }
#else
  auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source(i))); };
  auto column = [&](int i, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(target(i)), x); };
  __m128i a = row(0), b = row(1), c = row(2), d = row(3);
  __m128i ac = _mm_unpacklo_epi32(a, c), bd = _mm_unpacklo_epi32(b, d);
  column(0, _mm_unpacklo_epi32(ac, bd)), column(1, _mm_unpackhi_epi32(ac, bd));
  ac = _mm_unpackhi_epi32(a, c), bd = _mm_unpackhi_epi32(b, d);
  column(2, _mm_unpacklo_epi32(ac, bd)), column(3, _mm_unpackhi_epi32(ac, bd));
#endif
}

// The same four bytes of a row in each lane, as dot4 wants them. In memory they are SPLIT_WORDS words, `stride` words apart;
// word i of them is split_word(bytes, i).
#if defined(__AVX512F__) || !defined(__AVX2__)
using SplitQuad = Quads;
constexpr int SPLIT_WORDS = 1;
inline uint32_t split_word(uint32_t bytes, int) { return bytes; }
inline SplitQuad spread_split(const uint32_t* x, int) { return spread_quad(x[0]); }
#endif

// Products of bytes as load_int8 gives them, or of numbers below 2^BITS, by signed bytes other than -128, on their way to a
// lane's sum: `add` at most MOST times between `begin` and `total`, which both get that sum.
template <int BITS>
class Terms {
 public:
  static constexpr int MOST = 1 << 10;
  void begin(const Ints& sum) { sum_ = sum; }
  void add(const Quads& u, const SplitQuad& s) { sum_ = dot4(sum_, u, s); }
  Ints total(const Ints&) const { return sum_; }

 private:
  Ints sum_;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
template <> class Terms<4> : public SmallTerms<4> {};
template <> class Terms<5> : public SmallTerms<5> {};
template <> class Terms<6> : public SmallTerms<6> {};
#endif

#if !defined(__AVX512F__)
// 16 numbers float16, none of them infinite or NaN.
inline Floats load_fp16(const uint16_t* p) {
  Ints bits = bits_of(load_bf16(p));  // in the upper half of a lane
  Floats size = mul(floats_of(right<4>(left<1>(bits))), power_of_two(spread(112.0f)));
  return floats_of(exclusive_or(bits_of(size), left<31>(right<31>(bits))));
}

// 16 numbers float8_e4m3fn, none of them negative or NaN.
inline Floats load_fp8(const uint8_t* p) {
  Ints x = load_bytes(p);
  Floats normal = floats_of(add_ints(left<20>(x), spread_int(120 << 23)));
  return where_zero(right<3>(x), mul(as_floats(x), spread(1.0f / 512)), normal);
}

// 16 numbers float8_e4m3fn, none of them NaN.
inline Floats load_signed_fp8(const uint8_t* p) {
  Ints x = load_bytes(p), size = right<25>(left<25>(x));
  Floats normal = floats_of(add_ints(left<20>(size), spread_int(120 << 23)));
  Floats value = where_zero(right<3>(size), mul(as_floats(size), spread(1.0f / 512)), normal);
  return floats_of(exclusive_or(bits_of(value), left<31>(right<7>(x))));
}

// 16 signed bytes.
inline Floats load_signed(const int8_t* p) {
  return as_floats(signed_right<24>(left<24>(load_bytes(reinterpret_cast<const uint8_t*>(p)))));
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
