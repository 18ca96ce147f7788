// What a decoder does to single rows between its products: norm, rotation and gated activation, in float32 inside.
#pragma once
#include <cmath>

#include "simd.h"

namespace sametoken {

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2 };

// y = x / rms(x) * (weight + shift) over `size` numbers, a multiple of 16; y may be x, and a null weight is 1.
inline void rms_norm(const bf16* x, const bf16* weight, bf16* y, int size, float eps, float shift) {
  Floats squares = zeros();
  for (int i = 0; i < size; i += LANES) {
    Floats v = load_bf16(x + i);
    squares = fma(v, v, squares);
  }
  Floats factor = spread(1.0f / std::sqrt(lane_sum(squares) / float(size) + eps));
  for (int i = 0; i < size; i += LANES) {
    Floats gain = weight == nullptr ? spread(1.0f) : load_bf16(weight + i);
    if (shift != 0) gain = add(gain, spread(shift));
    store_bf16(y + i, mul(mul(load_bf16(x + i), factor), gain));
  }
}

// Multiplies `size` numbers, a multiple of 16, in place.
inline void scale_row(bf16* x, int size, float scale) {
  for (int i = 0; i < size; i += LANES) store_bf16(x + i, mul(load_bf16(x + i), spread(scale)));
}

inline float number(bf16 x) { return to_float(x); }
inline float number(float x) { return x; }
inline Floats numbers(const bf16* p) { return load_bf16(p); }
inline Floats numbers(const float* p) { return load(p); }

// Rotates the first `dim` numbers of a head in place, where a pair stands side by side. cos and sin are [dim], the sine
// of a pair's first number negated; in float32 each operation is rounded alone, as in a product of complex numbers.
template <class T>
inline void rotate_pairs(bf16* head, const T* cos, const T* sin, int dim) {
  auto turned = [](float a, T cos, float b, T sin) {
    float crossed = b * number(sin);
    return to_bf16(sizeof(T) == 4 ? a * number(cos) + crossed : std::fma(a, number(cos), crossed));
  };
  for (int i = 0; i < dim; i += 2) {
    float a = to_float(head[i]), b = to_float(head[i + 1]);
    head[i] = turned(a, cos[i], b, sin[i]);
    head[i + 1] = turned(b, cos[i + 1], a, sin[i + 1]);
  }
}

// The same where a pair stands half of `dim` apart: sin's first half is negated.
template <class T>
inline void rotate(bf16* head, const T* cos, const T* sin, int dim) {
  int half = dim / 2, whole = half / LANES * LANES;
  for (int i = whole; i < half; i++) {
    float a = to_float(head[i]), b = to_float(head[half + i]);
    head[i] = to_bf16(std::fma(a, number(cos[i]), b * number(sin[i])));
    head[half + i] = to_bf16(std::fma(b, number(cos[half + i]), a * number(sin[half + i])));
  }
  for (int i = 0; i < whole; i += LANES) {
    Floats a = load_bf16(head + i), b = load_bf16(head + half + i);
    store_bf16(head + i, fma(a, numbers(cos + i), mul(b, numbers(sin + i))));
    store_bf16(head + half + i, fma(b, numbers(cos + half + i), mul(a, numbers(sin + half + i))));
  }
}

inline Floats sigmoid(Floats x) { return divide(spread(1.0f), add(spread(1.0f), exponential(sub(zeros(), x)))); }

inline Floats activate(Floats x, int32_t kind) {
  if (kind == SILU) return mul(x, sigmoid(x));
  if (kind == GELU_TANH) {  // tanh(u) = 2 sigmoid(2 u) - 1
    Floats u = mul(spread(0.7978845608f), fma(mul(mul(x, x), x), spread(0.044715f), x));
    return mul(x, sigmoid(mul(spread(2.0f), u)));
  }
  float lanes[LANES];
  store(lanes, x);
  for (float& v : lanes) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
  return load(lanes);
}

// cap tanh(x / cap), as tanh(u) = 2 sigmoid(2 u) - 1
inline Floats capped(Floats x, float cap) {
  Floats twice = mul(spread(2.0f), sigmoid(mul(x, spread(2.0f / cap))));
  return mul(spread(cap), sub(twice, spread(1.0f)));
}

// How a gated MLP joins gate and up: activation(gate) * up; where there is a gain, min(gate, limit) with the activation
// x * sigmoid(gain * x), and up within the limit, moved by 1 (gpt-oss).
struct Gate {
  int32_t activation;
  float gain, limit;
};

// y = gate joined with up over `size` numbers, a multiple of 16.
inline void gate_row(const bf16* gate, const bf16* up, bf16* y, int size, const Gate& how) {
  for (int i = 0; i < size; i += LANES) {
    Floats left = load_bf16(gate + i), right = load_bf16(up + i);
    if (how.gain == 0) {
      store_bf16(y + i, mul(activate(left, how.activation), right));
      continue;
    }
    left = lesser(spread(how.limit), left);
    right = add(greater(spread(-how.limit), lesser(spread(how.limit), right)), spread(1.0f));
    store_bf16(y + i, mul(mul(left, sigmoid(mul(spread(how.gain), left))), right));
  }
}

// x = e^(x - peak) over `count` numbers, of which whole vectors may be written; their sum, in order.
inline float exponentials(float* x, int count, float peak) {
  float sum = 0;
  for (int i = 0; i < count; i += LANES) store(x + i, exponential(sub(load(x + i), spread(peak))));
  for (int i = 0; i < count; i++) sum += x[i];
  return sum;
}

inline Floats rounded(Floats x) {
  bf16 lanes[LANES];
  store_bf16(lanes, x);
  return load_bf16(lanes);
}

}  // namespace sametoken
