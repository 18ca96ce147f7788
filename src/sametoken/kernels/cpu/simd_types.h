// What every set of instructions shares: the number of lanes and single numbers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

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

inline uint32_t dword(const void* at) {
  uint32_t value;
  std::memcpy(&value, at, 4);
  return value;
}

}  // namespace sametoken
