// What every set of instructions shares: the number of lanes and single numbers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sametoken {

using bf16 = uint16_t;
constexpr int LANES = 16;

// As bfloat16, by the low five bits: 0 .. 15 and -16 .. -1; a 4-bit float twice; the subnormal float8_e4m3fn.
constexpr uint16_t SMALL_INTS[32] = {
    0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
constexpr uint16_t FP4_VALUES[32] = {
    0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
    0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
constexpr uint16_t FP8_TINY[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

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
