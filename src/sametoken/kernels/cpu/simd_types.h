// What every set of instructions shares: the number of lanes, single numbers, and a word for loops.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sametoken {

using bf16 = uint16_t;
constexpr int LANES = 16;

// Before a loop of a known number of turns, at most 8, over an array of vectors: the compiler unrolls it early enough to
// keep the array in registers.
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

// As bfloat16: 0 .. 15, -8 .. 7, a 4-bit float, and by the low five bits 0 .. 15 and -16 .. -1.
constexpr uint16_t SMALL_INTS[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                     0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
constexpr uint16_t CENTRED_INTS[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                       0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
constexpr uint16_t FP4_VALUES[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                     0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
constexpr uint16_t SIGNED_INTS[32] = {
    0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

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

inline uint32_t dword(const void* at) {
  uint32_t value;
  std::memcpy(&value, at, 4);
  return value;
}

}  // namespace sametoken
