// A packed weight and the rows that it is multiplied by, as the kernels of linear.h and codes.h read them.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "simd_amx.h"

namespace sametoken {

// Formats from FP8 on have codes of other tools: they multiply them by bfloat16 rows, and those from BLOCK_INT4 on by bytes.
enum Format : int32_t {
  BF16 = 0, INT8 = 1, INT8_WEIGHT_ONLY = 2, INT4 = 3, FP8 = 4, FP4 = 5, GROUPED_INT4 = 6, GROUPED_INT8 = 7,
  BLOCK_INT4 = 8, BLOCK_INT5 = 9, BLOCK_INT6 = 10, BLOCK_INT8 = 11,
};
enum Scales : int64_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT8 = 3, POWER8 = 4, STEPPED8 = 5 };

struct Weight {
  int32_t format, in, out, group;  // group: inputs that share a scale (INT4, and FP8 on)
  int32_t matrix;                  // whether the processor's matrix unit multiplies it, see matrix.h
  const uint8_t* data;             // tiles, see the kernels; in and out padded to whole steps and tiles
  const void* scale;               // float [out] (INT8, INT8_WEIGHT_ONLY), bf16 [tile][in / group][16] (INT4), Codes (FP8 on)
  const bf16* bias;                // [out], padded, or null
};

// What codes of other tools mean; out is padded to whole tiles. Null where there are none.
struct Codes {
  const void* scale;     // [tile][in / group][16], of the kind that `scales` says
  const float* factor;   // [out], multiplies the scales
  const int8_t* zero;    // [tile][in / group][16], the code of zero
  const int32_t* order;  // [in padded], the input at each place of a row
  int64_t scales;        // one of Scales
  const void* offset;    // [tile][in / group][16], subtracted from scaled weights: signed bytes with steps, else float32
  const uint16_t* step;  // [tile][in / group / groups][16] float16, multiplies the scales of its groups (STEPPED8)
  const uint16_t* offset_step;  // the same for the offsets
  int64_t groups;        // that share a step
};

inline const Codes* codes_of(const Weight& w) { return w.format < FP8 ? nullptr : static_cast<const Codes*>(w.scale); }
inline bool wants_blocks(const Weight& w) { return w.format >= BLOCK_INT4; }
inline bool wants_bytes(const Weight& w) { return w.format == INT8 || w.format == INT4 || wants_blocks(w); }
inline int words_of_quad(const Weight& w) { return w.format == INT8 || w.format == BLOCK_INT8 ? SPLIT_WORDS : 1; }  // of four bytes

// Whether `count` rows lie in lines for such a weight. Integers have the same sums without the unit, faster for a few rows.
inline bool in_lines(const Weight& w, int count) {
  constexpr int LEAST = 10;
  return MATRIX_UNIT && w.matrix != 0 && (w.format == BF16 || (w.format == INT8 && count >= LEAST));
}

// The code of zero, where rows are blocks of bytes.
inline int32_t zero_of(const Weight& w) {
  if (w.format == BLOCK_INT4) return codes_of(w)->offset == nullptr ? 8 : 0;
  if (w.format == BLOCK_INT5) return codes_of(w)->offset == nullptr ? 16 : 0;
  return w.format == BLOCK_INT6 ? 32 : INT8_OFFSET;
}

inline int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
inline int tiles_of(const Weight& w) { return (w.out + LANES - 1) / LANES; }

// The values of 16 outputs from `at` on, with their biases.
inline Floats biased(const Weight& w, int at, Floats values) {
  return w.bias == nullptr ? values : add(values, load_bf16(w.bias + at));
}

// Memory for `count` things, aligned to a cache line, from where `memory` points on.
template <class T>
inline void take(char*& memory, T*& to, int64_t count) {
  to = reinterpret_cast<T*>(memory);
  memory += padded(count * int64_t(sizeof(T)), 64);
}

// How `count` rows are cut into blocks of nearly equal height.
struct Blocks {
  static constexpr int MOST = REGISTERS == 32 ? 8 : 4;
  int count, height;
  explicit Blocks(int rows) : count(rows), height((rows + (rows + MOST - 1) / MOST - 1) / ((rows + MOST - 1) / MOST)) {}
  int height_at(int first) const { return count - first < height ? count - first : height; }
};

// The rows that a linear reads, as bfloat16 or, for the formats that want them, as signed bytes q with x = q * scale.
// "By block" means: of each block of rows all that a kernel reads one after the other, the block's rows side by side.
// Rows in lines lie by blocks of 16 rows and 64 bytes of a row at a time.
struct Rows {
  Blocks blocks;
  int64_t width;     // numbers of a row, a multiple of 128, zero past the row's end
  uint32_t* words;   // by block: [word of a row][rows of the block]
  float* scale;      // [count], or by block [width / 32][rows] where 32 bytes share one
  int32_t* sums;     // [count][width / 32] sums of q up to 32 inputs, 64, .., or by block [width / 16][rows] by group, times -zero
  int32_t* totals;   // [count] sums of q over all inputs
  float* minus;      // for offsets, sums of x by group times -1: [count][width / 16], or by block [width / 16][rows]

  static size_t bytes(int64_t count, int64_t width) {
    return size_t(count * (width * 2 + width / 32 * 4 + 2 * width / LANES * 4 + 4)) + 5 * 64;
  }

  static Rows in(char*& memory, int64_t count, int64_t width) {
    Rows rows{Blocks(int(count)), width, nullptr, nullptr, nullptr, nullptr, nullptr};
    take(memory, rows.words, count * width / 2);
    take(memory, rows.scale, count * width / 32);
    take(memory, rows.sums, count * width / LANES);
    take(memory, rows.totals, count);
    take(memory, rows.minus, count * width / LANES);
    return rows;
  }

  // `count` rows from `first` on, in blocks of their own.
  Rows part(int64_t first, int count) const {
    return {Blocks(count), width, words + first * width / 2, scale + first * width / 32, sums + first * width / LANES,
            totals + first, minus + first * width / LANES};
  }

  // Stores a row of `width` bfloat16 numbers in the form that `w` reads.
  void set(int row, const bf16* x, const Weight& w, int8_t* bytes) const {
    const void* source = x;
    int64_t size = width / 2;
    if (wants_bytes(w)) {
      if (wants_blocks(w)) quantise_blocks(row, x, w, bytes);
      else quantise(row, x, bytes);
      source = bytes;
      size = width / 4;
    } else if (const Codes* codes = codes_of(w)) {
      if (codes->order != nullptr) return reorder(row, x, codes->order);
      if (codes->offset != nullptr) sum_groups(row, x, w);
    }
    if (in_lines(w, blocks.count)) return set_lines(row, source, size);
    int height = height_of(row), split = wants_bytes(w) ? words_of_quad(w) : 1;
    uint32_t* to = words + place(row, size * split);
    for (int64_t k = 0; k < size; k++, to += split * height) {
      uint32_t word = dword(static_cast<const char*>(source) + 4 * k);
      for (int i = 0; i < split; i++) to[i * height] = split == 1 ? word : split_word(word, i);
    }
  }

  const uint32_t* block(int first, const Weight& w) const {
    return words + first * (wants_bytes(w) ? width / 4 * words_of_quad(w) : width / 2);
  }
  const char* lines(int first, const Weight& w) const { return reinterpret_cast<const char*>(block(first, w)); }

 private:
  int height_of(int row) const { return blocks.height_at(row / blocks.height * blocks.height); }

  // Where the first of `size` things of a row lies that lie by block.
  int64_t place(int row, int64_t size) const {
    int first = row / blocks.height * blocks.height;
    return first * size + (row - first);
  }

  void set_lines(int row, const void* source, int64_t size) const {
    int first = row / LANES * LANES, height = std::min(LANES, blocks.count - first);
    uint32_t* to = words + first * size + (row - first) * LANES;
    for (int64_t k = 0; k < size; k += LANES, to += height * LANES)
      std::memcpy(to, static_cast<const char*>(source) + 4 * k, 4 * LANES);
  }

  // Sums the inputs of each group; groups have whole vectors of them.
  void sum_groups(int row, const bf16* x, const Weight& w) const {
    for (int64_t begin = 0; begin < w.in; begin += w.group) {
      float sum = 0;
      for (int64_t i = begin; i + LANES <= std::min(begin + w.group, width); i += LANES) sum += lane_sum(load_bf16(x + i));
      minus[row * (width / LANES) + begin / w.group] = -sum;
    }
  }

  // Stores bfloat16 pairs of a row whose weights lie in another order.
  void reorder(int row, const bf16* x, const int32_t* order) const {
    int height = height_of(row);
    uint32_t* to = words + place(row, width / 2);
    for (int64_t k = 0; k < width / 2; k++) to[k * height] = x[order[2 * k]] | uint32_t(x[order[2 * k + 1]]) << 16;
  }

  // 127 / peak, by which numbers become bytes; 0 where they have no bytes or are too small for them.
  static float inverse_of(float peak) {
    float inverse = 127.0f / peak;
    return std::isfinite(inverse) ? inverse : 0.0f;
  }

  // q = round(x * inverse) of 32 numbers, in float32.
  static void round_bytes(const bf16* x, float inverse, int8_t* q) {
    for (int j = 0; j < 32; j += LANES) {
      Floats scaled = nearest(mul(load_bf16(x + j), spread(inverse)));
      store_int8(q + j, lesser(greater(scaled, spread(-127.0f)), spread(127.0f)));
    }
  }

  static int32_t sum_of(const int8_t* q, int count) {
    int32_t sum = 0;
    for (int j = 0; j < count; j++) sum += q[j];
    return sum;
  }

  // q = round(x * 127 / max|x|). A row that is not finite has a scale of NaN: integers cannot say it.
  void quantise(int row, const bf16* x, int8_t* q) const {
    Floats most = zeros(), poison = zeros();
    for (int64_t i = 0; i < width; i += LANES) {
      Floats values = load_bf16(x + i);
      most = greater(most, magnitude(values));
      poison = fma(values, zeros(), poison);
    }
    float peak = lane_max(most), inverse = inverse_of(peak);
    scale[row] = peak / 127.0f + lane_sum(poison);
    totals[row] = 0;
    for (int64_t i = 0; i < width; i += 32) {
      round_bytes(x + i, inverse, q + i);
      totals[row] += sum_of(q + i, 32);
      sums[row * (width / 32) + i / 32] = totals[row];
    }
  }

  // The same for each 32 inputs alone.
  void quantise_blocks(int row, const bf16* x, const Weight& w, int8_t* q) const {
    int height = height_of(row), group = w.group, per = 32 / group;
    float *to_scale = scale + place(row, width / 32), *to_minus = minus + place(row, width / LANES);
    int32_t *to_sum = sums + place(row, width / LANES), zero = zero_of(w);
    for (int64_t i = 0; i < width / 32; i++) {
      bf16 bits = 0;  // of the greatest magnitude: those of Inf and NaN exceed all others
      for (int j = 0; j < 32; j++) bits = std::max(bits, bf16(x[32 * i + j] & 0x7fff));
      float peak = to_float(bits), one = bits < 0x7f80 ? peak / 127.0f : std::numeric_limits<float>::quiet_NaN();
      to_scale[i * height] = one;
      round_bytes(x + 32 * i, inverse_of(peak), q + 32 * i);
      for (int64_t g = i * per; g < (i + 1) * per; g++) {
        int32_t sum = sum_of(q + g * group, group);
        to_sum[g * height] = -zero * sum;
        to_minus[g * height] = -(one * float(sum));
      }
    }
  }
};

// What takes 16 outputs of a row from output `at` on, and cuts those past the last one: a reference to a function
// take(row, at, values). Kernels that know it by its address are compiled once for all.
class Sink {
 public:
  template <class Take>
  Sink(const Take& take)
      : take_(&take), call_([](const void* to, int row, int at, const Floats& values) { (*static_cast<const Take*>(to))(row, at, values); }) {}

  void operator()(int row, int at, const Floats& values) const { call_(take_, row, at, values); }

 private:
  const void* take_;
  void (*call_)(const void*, int, int, const Floats&);
};

// How many tiles a kernel computes together: as many as the registers hold sums of M rows for, beside `more` a row or tile.
constexpr int tiles_together(int rows, int more) {
  int fit = (REGISTERS == 32 ? 30 : 7) / (rows + more);
  return fit < 1 ? 1 : fit > 4 ? 4 : fit;
}

// How far ahead of its reading a kernel asks for weights: the processor's own prefetching loses a stream where a tile ends,
// and waits for memory and arithmetic in turn where there is much of the latter.
class Lead {
 public:
  Lead(int64_t tile_bytes, int64_t step_bytes, int tiles)
      : jump_((tiles - 1) * tile_bytes), turn_(tile_bytes / step_bytes - AHEAD / step_bytes) {}

  // Bytes ahead of step `k`; from shortly before a tile's end on, those of the tile that its stream goes on with.
  int64_t at(int64_t k) const { return k < turn_ ? AHEAD : AHEAD + jump_; }

 private:
  static constexpr int64_t AHEAD = 2048;
  int64_t jump_, turn_;
};

}  // namespace sametoken
