// What a cache stores of keys and values: bfloat16 numbers, or bytes with one scale for each vector of a token and head.
//
// Source of the formats: `sametoken.runtime.kv_format`, whose bits `encode` gives.
#pragma once
#include "simd.h"

namespace sametoken {

enum KVForm : int32_t { KV_BF16 = 0, KV_INT8 = 1, KV_FP8 = 2 };

inline int64_t kv_bytes(int32_t form) { return form == KV_BF16 ? 2 : 1; }

// Sixteen lanes of bytes float8_e4m3fn, each as a whole number -128 .. 127, of numbers from -448 to 448; ties to even.
inline Floats fp8_codes(Floats x) {
  Floats size = magnitude(x);
  Ints bits = bits_of(size), odd = right<31>(left<11>(bits));
  Ints normal = sub_ints(right<20>(add_ints(bits, add_ints(odd, spread_int(0x7ffff)))), spread_int(120 << 3));
  Floats tiny = nearest(mul(size, spread(512.0f)));
  Floats code = where_less(size, spread(1.0f / 64), tiny, as_floats(normal));
  return where_zero(right<31>(bits_of(x)), code, sub(code, spread(128.0f)));
}

// Stores a vector of `size` numbers, a multiple of 16, as codes; returns their scale.
inline float encode(int32_t form, const bf16* x, int size, char* to) {
  Floats most = zeros();
  for (int i = 0; i < size; i += LANES) most = greater(most, magnitude(load_bf16(x + i)));
  float scale = lane_max(most) / (form == KV_INT8 ? 127.0f : 448.0f);
  scale = scale > 0x1p-100f ? scale : 0x1p-100f;
  for (int i = 0; i < size; i += LANES) {
    Floats y = divide(load_bf16(x + i), spread(scale));
    store_int8(reinterpret_cast<int8_t*>(to) + i, form == KV_INT8 ? nearest(y) : fp8_codes(y));
  }
  return scale;
}

inline Floats load_code(int32_t form, const char* p) {
  if (form == KV_INT8) return load_signed(reinterpret_cast<const int8_t*>(p));
  return load_signed_fp8(reinterpret_cast<const uint8_t*>(p));
}

// A query as products with codes read it. For int8 it is 256 `high` + `low`, times `step`, so that products are of whole
// numbers; its error is 1 / 65024 of its greatest number, less than bfloat16's.
struct Query {
  uint32_t *high, *low;           // [size / 4][SPLIT_WORDS], of int8
  bf16* numbers;                  // [size], of fp8: of each four numbers 0 and 2, then 1 and 3
  int32_t high_total, low_total;  // sums of each
  float step;

  static size_t bytes(int32_t form, int size) { return (form == KV_INT8 ? 2 * SPLIT_WORDS : 2) * size_t(size); }

  Query(int32_t form, const bf16* x, int size, char* memory)
      : high(reinterpret_cast<uint32_t*>(memory)), low(high + size / 4 * SPLIT_WORDS), numbers(reinterpret_cast<bf16*>(memory)) {
    if (form == KV_INT8) split(x, size);
    else for (int i = 0; i < size; i += 4)
      for (int k = 0; k < 4; k++) numbers[i + k] = x[i + (k & 1) * 2 + k / 2];
  }

  // Products of Q queries with K times sixteen vectors of int8 codes whose words are turned: `turned`[k][word][vector].
  template <int Q, int K>
  static void times(const Query* queries, const uint32_t* turned, int stride, int words, Floats (&out)[Q][K]) {
    Ints upper[Q][K], lower[Q][K];
    for (int q = 0; q < Q; q++)
      for (int k = 0; k < K; k++) {
        upper[q][k] = spread_int(-INT8_OFFSET * queries[q].high_total);
        lower[q][k] = spread_int(-INT8_OFFSET * queries[q].low_total);
      }
    for (int word = 0; word < words; word++) {
      Quads codes[K];
      for (int k = 0; k < K; k++) codes[k] = load_int8(turned + k * stride + word * LANES);
      for (int q = 0; q < Q; q++) {
        int at = word * SPLIT_WORDS;
        SplitQuad high = spread_split(queries[q].high + at, 1), low = spread_split(queries[q].low + at, 1);
        for (int k = 0; k < K; k++) {
          upper[q][k] = dot4(upper[q][k], codes[k], high);
          lower[q][k] = dot4(lower[q][k], codes[k], low);
        }
      }
    }
    for (int q = 0; q < Q; q++)
      for (int k = 0; k < K; k++)
        out[q][k] = mul(fma(as_floats(upper[q][k]), spread(256.0f), as_floats(lower[q][k])), spread(queries[q].step));
  }

 private:
  static void store_split(uint32_t* to, Floats whole) {
    int8_t bytes[LANES];
    store_int8(bytes, whole);
    for (int i = 0; i < LANES / 4 * SPLIT_WORDS; i++) to[i] = split_word(dword(bytes + i / SPLIT_WORDS * 4), i % SPLIT_WORDS);
  }

  void split(const bf16* x, int size) {
    Floats most = zeros(), high_sum = zeros(), low_sum = zeros();
    for (int i = 0; i < size; i += LANES) most = greater(most, magnitude(load_bf16(x + i)));
    step = lane_max(most) / 32512.0f;
    step = step > 0x1p-100f ? step : 0x1p-100f;
    for (int i = 0; i < size; i += LANES) {
      Floats whole = nearest(divide(load_bf16(x + i), spread(step)));
      Floats upper = floor_of(mul(add(whole, spread(128.0f)), spread(1.0f / 256)));
      Floats lower = sub(whole, mul(upper, spread(256.0f)));
      store_split(high + i / 4 * SPLIT_WORDS, upper);
      store_split(low + i / 4 * SPLIT_WORDS, lower);
      high_sum = add(high_sum, upper);
      low_sum = add(low_sum, lower);
    }
    high_total = int32_t(lane_sum(high_sum));
    low_total = int32_t(lane_sum(low_sum));
  }
};

}  // namespace sametoken
