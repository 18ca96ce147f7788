// A packed weight and the rows that it is multiplied by, as the kernels of linear.h and codes.h read them.
#pragma once
#include <algorithm>

#include "simd.h"

namespace sametoken {

// Formats from FP8 on have codes of other tools and multiply them by bfloat16 rows.
enum Format : int32_t { BF16 = 0, INT8 = 1, INT8_WEIGHT_ONLY = 2, INT4 = 3, FP8 = 4, FP4 = 5, GROUPED_INT4 = 6, GROUPED_INT8 = 7 };
enum Scales : int64_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT8 = 3, POWER8 = 4, STEPPED8 = 5 };

struct Weight {
  int32_t format, in, out, group;  // group: inputs that share a scale (INT4, and FP8 on)
  const uint8_t* data;             // tiles, see the kernels; in and out padded to whole steps and tiles
  const void* scale;               // float [out] (INT8, INT8_WEIGHT_ONLY), bf16 [in / group][out] (INT4), Codes (FP8 on)
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
inline bool wants_bytes(const Weight& w) { return w.format == INT8 || w.format == INT4; }
inline int64_t padded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
inline int tiles_of(const Weight& w) { return (w.out + LANES - 1) / LANES; }

// How `count` rows are cut into blocks of nearly equal height.
struct Blocks {
  static constexpr int MOST = REGISTERS == 32 ? 8 : 4;
  int count, height;
  explicit Blocks(int rows) : count(rows), height((rows + (rows + MOST - 1) / MOST - 1) / ((rows + MOST - 1) / MOST)) {}
  int height_at(int first) const { return count - first < height ? count - first : height; }
};

// The rows that a linear reads, as bfloat16 or, for the formats that want them, as signed bytes q with x = q * scale.
struct Rows {
  Blocks blocks;
  int64_t width;     // numbers of a row, a multiple of 128, zero past the row's end
  uint32_t* words;   // by block: [word of a row][rows of the block]
  float* scale;      // [count]
  int32_t* sums;     // [count][width / 32] sums of q over 32 inputs, or float [count][width / 16] by group for offsets
  int32_t* totals;   // [count] sums of q over all inputs

  // Stores a row of `width` bfloat16 numbers in the form that `w` reads.
  void set(int row, const bf16* x, const Weight& w, int8_t* bytes) const {
    const void* source = x;
    int64_t size = width / 2;
    if (const Codes* codes = codes_of(w); codes != nullptr && codes->order != nullptr) return reorder(row, x, codes->order);
    if (const Codes* codes = codes_of(w); codes != nullptr && codes->offset != nullptr) sum_groups(row, x, w);
    if (wants_bytes(w)) {
      quantise(row, x, bytes);
      source = bytes;
      size = width / 4;
    }
    int first = row / blocks.height * blocks.height, height = blocks.height_at(first);
    uint32_t* to = words + first * size + (row - first);
    for (int64_t k = 0; k < size; k++) to[k * height] = dword(static_cast<const char*>(source) + 4 * k);
  }

  float* minus_sums(int row) const { return reinterpret_cast<float*>(sums) + row * (width / LANES); }
  const uint32_t* block(int first, const Weight& w) const { return words + first * (width / (wants_bytes(w) ? 4 : 2)); }

 private:
  // Sums the inputs of each group; groups have whole vectors of them.
  void sum_groups(int row, const bf16* x, const Weight& w) const {
    for (int64_t begin = 0; begin < w.in; begin += w.group) {
      float sum = 0;
      for (int64_t i = begin; i + LANES <= std::min(begin + w.group, width); i += LANES) sum += lane_sum(load_bf16(x + i));
      minus_sums(row)[begin / w.group] = -sum;
    }
  }

  // Stores bfloat16 pairs of a row whose weights lie in another order.
  void reorder(int row, const bf16* x, const int32_t* order) const {
    int first = row / blocks.height * blocks.height, height = blocks.height_at(first);
    uint32_t* to = words + first * (width / 2) + (row - first);
    for (int64_t k = 0; k < width / 2; k++) to[k * height] = x[order[2 * k]] | uint32_t(x[order[2 * k + 1]]) << 16;
  }

  // q = round(x * 127 / max|x|), in float32. A row that is not finite has a scale of NaN: integers cannot say it.
  void quantise(int row, const bf16* x, int8_t* q) const {
    Floats most = zeros(), poison = zeros();
    for (int64_t i = 0; i < width; i += LANES) {
      Floats values = load_bf16(x + i);
      most = greater(most, magnitude(values));
      poison = fma(values, zeros(), poison);
    }
    float peak = lane_max(most);
    Floats inverse = spread(peak > 0 ? 127.0f / peak : 0.0f);
    scale[row] = peak / 127.0f + lane_sum(poison);
    totals[row] = 0;
    for (int64_t i = 0; i < width; i += 32) {
      for (int64_t j = i; j < i + 32; j += LANES) {
        Floats scaled = nearest(mul(load_bf16(x + j), inverse));
        store_int8(q + j, lesser(greater(scaled, spread(-127.0f)), spread(127.0f)));
      }
      int32_t sum = 0;
      for (int64_t j = i; j < i + 32; j++) sum += q[j];
      sums[row * (width / 32) + i / 32] = sum;
      totals[row] += sum;
    }
  }
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
