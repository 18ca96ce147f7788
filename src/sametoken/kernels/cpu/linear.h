// y = x W^T for packed weights, at the price of reading the weights once for any small number of rows.
//
// A weight lies in tiles of 16 outputs, and within a tile in steps of the inputs, so that a tile streams through a core.
// An unpacked step serves a block of up to 8 rows before the next is read, and rows of a block lie interleaved, one word
// (two bfloat16 or four bytes) of each at a time. An output is one sum in the order of its inputs: which rows and tiles
// are computed together never shows in it.
#pragma once
#include <algorithm>

#include "simd.h"
#include "team.h"

namespace sametoken {

// Formats from FP8 on have codes of other tools and multiply them by bfloat16 rows.
enum Format : int32_t { BF16 = 0, INT8 = 1, INT8_WEIGHT_ONLY = 2, INT4 = 3, FP8 = 4, FP4 = 5, GROUPED_INT4 = 6, GROUPED_INT8 = 7 };
enum Scales : int64_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT8 = 3, POWER8 = 4, STEPPED8 = 5 };

struct Weight {
  int32_t format, in, out, group;  // group: inputs that share a scale (INT4, and FP8 on)
  const uint8_t* data;             // tiles, see the kernels below; in and out padded to whole steps and tiles
  const void* scale;               // float [out] (INT8, INT8_WEIGHT_ONLY), bf16 [in / group][out] (INT4), Codes (FP8 on)
  const bf16* bias;                // [out], padded, or null
};

// What codes of other tools mean; out is padded to whole tiles. Null where there are none.
struct Codes {
  const void* scale;     // [in / group][out], of the kind that `scales` says
  const float* factor;   // [out], multiplies the scales
  const int8_t* zero;    // [in / group][out], the code of zero
  const int32_t* order;  // [in padded], the input at each place of a row
  int64_t scales;        // one of Scales
  const void* offset;    // [in / group][out], subtracted from scaled weights: signed bytes with steps, else float32
  const uint16_t* step;  // [in / group / groups][out] float16, multiplies the scales of its groups (STEPPED8)
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
  int32_t* sums;     // [count][width / 32] sums of q over 32 inputs, or float [count][width / 16] of x for offsets
  int32_t* totals;   // [count] sums of q over all inputs

  // Stores a row of `width` bfloat16 numbers in the form that `w` reads.
  void set(int row, const bf16* x, const Weight& w, int8_t* bytes) const {
    const void* source = x;
    int64_t size = width / 2;
    if (const Codes* codes = codes_of(w); codes != nullptr && codes->order != nullptr) return reorder(row, x, codes->order);
    if (const Codes* codes = codes_of(w); codes != nullptr && codes->offset != nullptr)
      for (int64_t i = 0; i < width / LANES; i++) part_sums(row)[i] = lane_sum(load_bf16(x + i * LANES));
    if (wants_bytes(w)) {
      quantise(row, x, bytes);
      source = bytes;
      size = width / 4;
    }
    int first = row / blocks.height * blocks.height, height = blocks.height_at(first);
    uint32_t* to = words + first * size + (row - first);
    for (int64_t k = 0; k < size; k++) to[k * height] = dword(static_cast<const char*>(source) + 4 * k);
  }

  float* part_sums(int row) const { return reinterpret_cast<float*>(sums) + row * (width / LANES); }
  const uint32_t* block(int first, const Weight& w) const { return words + first * (width / (wants_bytes(w) ? 4 : 2)); }

 private:
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

// The kernels. tile<M, N> computes M rows from `row` on for N tiles from `tile` on, into out[m][n].

// [tile][in / 2][16][2]: bfloat16, or signed bytes that are unpacked to it.
template <int BYTES>
struct WideKernel {
  static constexpr int together(int rows) { return tiles_together(rows, 2); }

  static Pairs unpack(const uint8_t* at) {
    if constexpr (BYTES == 64) return load_pairs(at);
    else return widen_bytes(at);
  }

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    int64_t steps = padded(w.in, 128) / 2, size = steps * BYTES;
    Lead lead(size, BYTES, N);
    const uint8_t* data = w.data + tile * size;
    const uint32_t* x = rows.block(row, w);
    Floats sums[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) sums[m][n] = zeros();
    for (int64_t k = 0; k < steps; k++, data += BYTES, x += M) {
      int64_t ahead = lead.at(k);
      Pairs weight[N];
      for (int n = 0; n < N; n++) {
        fetch(data + n * size + ahead);
        weight[n] = unpack(data + n * size);
      }
      for (int m = 0; m < M; m++) {
        Pairs input = spread_pair(x[m]);
        for (int n = 0; n < N; n++) sums[m][n] = dot2(sums[m][n], weight[n], input);
      }
    }
    for (int n = 0; n < N; n++) {
      Floats scale = BYTES == 64 ? spread(1.0f) : load(static_cast<const float*>(w.scale) + (tile + n) * LANES);
      for (int m = 0; m < M; m++) out[m][n] = mul(sums[m][n], scale);
    }
  }
};

// [tile][in / 4][16][4] bytes, each a signed weight + 128.
struct Int8Kernel {
  static constexpr int together(int rows) { return tiles_together(rows, 2); }

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    int64_t steps = padded(w.in, 128) / 4, size = steps * 64;
    Lead lead(size, 64, N);
    const uint8_t* data = w.data + tile * size;
    const uint32_t* x = rows.block(row, w);
    Ints sums[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) sums[m][n] = spread_int(-INT8_OFFSET * rows.totals[row + m]);
    for (int64_t k = 0; k < steps; k++, data += 64, x += M) {
      int64_t ahead = lead.at(k);
      Quads weight[N];
      for (int n = 0; n < N; n++) {
        fetch(data + n * size + ahead);
        weight[n] = load_int8(data + n * size);
      }
      for (int m = 0; m < M; m++) {
        Quads input = spread_quad(x[m]);
        for (int n = 0; n < N; n++) sums[m][n] = dot4(sums[m][n], weight[n], input);
      }
    }
    for (int n = 0; n < N; n++) {
      Floats scale = load(static_cast<const float*>(w.scale) + (tile + n) * LANES);
      for (int m = 0; m < M; m++) out[m][n] = mul(mul(as_floats(sums[m][n]), spread(rows.scale[row + m])), scale);
    }
  }
};

// [tile][in / 8][16][4] bytes; byte b of a lane holds inputs b (low nibble) and 4 + b, each a signed weight + 8.
struct Int4Kernel {
  static constexpr int together(int rows) { return rows <= 2 ? 4 : tiles_together(rows, 4); }

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    int64_t width = padded(w.in, 128), size = width * LANES / 2, outs = padded(w.out, LANES);
    Lead lead(size, 64, N);
    const uint8_t* data = w.data + tile * size;
    const bf16* scales = static_cast<const bf16*>(w.scale) + tile * LANES;
    const uint32_t* x = rows.block(row, w);
    const int32_t* partial = rows.sums + row * (rows.width / 32);
    Floats total[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) total[m][n] = zeros();
    for (int64_t begin = 0; begin < width; begin += w.group, scales += outs) {
      Ints sums[M][N];
      for (int m = 0; m < M; m++) {
        int32_t offset = 0;
        for (int64_t i = begin / 32; i < (begin + w.group) / 32; i++) offset -= 8 * partial[m * (rows.width / 32) + i];
        for (int n = 0; n < N; n++) sums[m][n] = spread_int(offset);
      }
      for (int64_t k = begin; k < begin + w.group; k += 8, data += 64, x += 2 * M) {
        int64_t ahead = lead.at(k / 8);
        Quads low[N], high[N];
        for (int n = 0; n < N; n++) {
          fetch(data + n * size + ahead);
          Quads both = load_quads(data + n * size);
          low[n] = low_nibbles(both);
          high[n] = high_nibbles(both);
        }
        for (int m = 0; m < M; m++) {
          Quads first = spread_quad(x[m]), second = spread_quad(x[M + m]);
          for (int n = 0; n < N; n++) sums[m][n] = dot4(dot4(sums[m][n], low[n], first), high[n], second);
        }
      }
      for (int n = 0; n < N; n++) {
        Floats scale = load_bf16(scales + n * LANES);
        for (int m = 0; m < M; m++) total[m][n] = add(total[m][n], mul(as_floats(sums[m][n]), scale));
      }
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) out[m][n] = mul(total[m][n], spread(rows.scale[row + m]));
  }
};

// Codes of other tools: a step of BYTES holds PAIRS pairs of inputs for each of 16 outputs, and unpack makes a pair
// bfloat16, which holds each code exactly. ZERO is the code of zero where the weight has no zero points.

// [tile][in / 2][16][2] bytes of float8_e4m3fn.
struct Fp8Code {
  static constexpr int BYTES = 32, PAIRS = 1, ZERO = 0;
  static Pairs unpack(const uint8_t* at, int, const Pairs&) { return pairs_of_fp8(at); }
};

// [tile][in / 2][16][2] signed bytes.
struct Int8Code {
  static constexpr int BYTES = 32, PAIRS = 1, ZERO = 0;
  static Pairs unpack(const uint8_t* at, int, const Pairs& zero) { return pairs_of_int16(sub_int16(int16_of_bytes(at), zero)); }
};

// [tile][in / 8][16] words: four even inputs in the low half, the odd ones in the high half, four bits each.
template <bool FLOAT>
struct FourBitCode {
  static constexpr int BYTES = 64, PAIRS = 4, ZERO = 8;
  static Pairs unpack(const uint8_t* at, int pair, const Pairs& zero) {
    Pairs codes = load_pairs(at);
    Pairs low = pair == 0 ? codes : pair == 1 ? right_int16<4>(codes) : pair == 2 ? right_int16<8>(codes) : right_int16<12>(codes);
    return FLOAT ? pairs_of_fp4(low) : pairs_of_small(sub_int16(low_int16(low), zero));
  }
};

inline Floats signed_bytes_at(const void* p, int64_t at) {
  return as_floats(signed_right<24>(left<24>(load_bytes(static_cast<const uint8_t*>(p) + at))));
}

inline Floats scale_at(const Codes& codes, int64_t at, int64_t step) {
  switch (codes.scales) {
    case FLOAT32: return load(static_cast<const float*>(codes.scale) + at);
    case FLOAT16: return load_fp16(static_cast<const uint16_t*>(codes.scale) + at);
    case BFLOAT16: return load_bf16(static_cast<const bf16*>(codes.scale) + at);
    case FLOAT8: return load_fp8(static_cast<const uint8_t*>(codes.scale) + at);
    case STEPPED8: return mul(signed_bytes_at(codes.scale, at), load_fp16(codes.step + step));
    default: return floats_of(left<23>(load_bytes(static_cast<const uint8_t*>(codes.scale) + at)));  // 2^(byte - 127)
  }
}

inline Floats offset_at(const Codes& codes, int64_t at, int64_t step) {
  if (codes.offset_step == nullptr) return load(static_cast<const float*>(codes.offset) + at);
  return mul(signed_bytes_at(codes.offset, at), load_fp16(codes.offset_step + step));
}

// Groups are summed one by one and added, each times its scale, in the order of the inputs.
template <class Code>
struct CodeKernel {
  static constexpr int together(int rows) { return tiles_together(2 * rows, 1); }  // sums of a group, and of all

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    constexpr int STEP = 2 * Code::PAIRS;  // inputs
    int64_t width = padded(w.in, 128), size = width / STEP * Code::BYTES, outs = padded(w.out, LANES), at = tile * LANES;
    const Codes& codes = *codes_of(w);
    Lead lead(size, Code::BYTES, N);
    const uint8_t* data = w.data + tile * size;
    const uint32_t* x = rows.block(row, w);
    Floats total[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) total[m][n] = zeros();
    for (int64_t begin = 0; begin < w.in; begin += w.group, at += outs) {
      Floats sums[M][N];
      Pairs zero[N];
      for (int n = 0; n < N; n++) {
        zero[n] = codes.zero == nullptr ? spread_pair((codes.offset == nullptr ? Code::ZERO : 0) * 0x10001) : twice_int16(codes.zero + at + n * LANES);
        for (int m = 0; m < M; m++) sums[m][n] = zeros();
      }
      int64_t end = std::min(begin + w.group, width);
      for (int64_t k = begin; k < end; k += STEP, data += Code::BYTES, x += Code::PAIRS * M) {
        int64_t ahead = lead.at(k / STEP);
        for (int n = 0; n < N; n++) fetch(data + n * size + ahead);
        for (int p = 0; p < Code::PAIRS; p++) {
          Pairs weight[N];
          for (int n = 0; n < N; n++) weight[n] = Code::unpack(data + n * size, p, zero[n]);
          for (int m = 0; m < M; m++) {
            Pairs input = spread_pair(x[p * M + m]);
            for (int n = 0; n < N; n++) sums[m][n] = dot2(sums[m][n], weight[n], input);
          }
        }
      }
      int64_t step = begin / w.group / codes.groups * outs + tile * LANES;
      for (int n = 0; n < N; n++) {
        Floats scale = scale_at(codes, at + n * LANES, step + n * LANES);
        for (int m = 0; m < M; m++) total[m][n] = fma(sums[m][n], scale, total[m][n]);
      }
      if (codes.offset != nullptr)
        for (int m = 0; m < M; m++) {
          float sum = 0;
          for (int64_t i = begin / LANES; i < end / LANES; i++) sum += rows.part_sums(row + m)[i];
          Floats inputs = spread(-sum);
          for (int n = 0; n < N; n++) {
            Floats offset = offset_at(codes, at + n * LANES, step + n * LANES);
            total[m][n] = fma(offset, inputs, total[m][n]);
          }
        }
    }
    for (int n = 0; n < N; n++) {
      Floats factor = codes.factor == nullptr ? spread(1.0f) : load(codes.factor + (tile + n) * LANES);
      for (int m = 0; m < M; m++) out[m][n] = mul(total[m][n], factor);
    }
  }
};

template <class Kernel, int M, int N, class Sink>
inline void tile_block(const Weight& w, const Rows& rows, int row, int tile, Sink& sink) {
  Floats sums[M][N];
  Kernel::template tile<M, N>(w, rows, row, tile, sums);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      int at = (tile + n) * LANES;
      sink(row + m, at, w.bias == nullptr ? sums[m][n] : add(sums[m][n], load_bf16(w.bias + at)));
    }
}

// Up to M rows over a few tiles, one by one.
template <class Kernel, int M, class Sink>
inline void ragged(const Weight& w, const Rows& rows, int row, int count, int tile, int end, Sink& sink) {
  if constexpr (M > 0) {
    if (count != M) return ragged<Kernel, M - 1>(w, rows, row, count, tile, end, sink);
    for (; tile < end; tile++) tile_block<Kernel, M, 1>(w, rows, row, tile, sink);
  }
}

// One phase of blocks of M rows.
template <class Kernel, int M, class Sink>
inline void linear_of(Worker& worker, const Weight& w, const Rows& rows, Sink& sink) {
  if constexpr (M > 0) {
    if (rows.blocks.height != M) return linear_of<Kernel, M - 1>(worker, w, rows, sink);
    int tiles = tiles_of(w);
    auto run = [&](auto together) {
      constexpr int N = decltype(together)::value;
      worker.each((tiles + N - 1) / N, [&](int task) {
        for (int row = 0; row < rows.blocks.count; row += M) {
          int left = rows.blocks.height_at(row);
          if (left == M && (task + 1) * N <= tiles) tile_block<Kernel, M, N>(w, rows, row, task * N, sink);
          else ragged<Kernel, M>(w, rows, row, left, task * N, std::min(tiles, (task + 1) * N), sink);
        }
      });
    };
    constexpr int N = Kernel::together(M);
    // Several tiles at once make the most of a row's loads, unless that leaves a thread without a task.
    if (tiles >= 2 * N * worker.threads()) run(std::integral_constant<int, N>{});
    else run(std::integral_constant<int, 1>{});
  }
}

// One phase: every output of x W^T + bias, handed to sink(row, first output, 16 values), which cuts what is past the end.
template <class Sink>
inline void linear(Worker& worker, const Weight& w, const Rows& rows, Sink sink) {
  switch (w.format) {
    case BF16: return linear_of<WideKernel<64>, Blocks::MOST>(worker, w, rows, sink);
    case INT8_WEIGHT_ONLY: return linear_of<WideKernel<32>, Blocks::MOST>(worker, w, rows, sink);
    case INT8: return linear_of<Int8Kernel, Blocks::MOST>(worker, w, rows, sink);
    case INT4: return linear_of<Int4Kernel, Blocks::MOST>(worker, w, rows, sink);
    case FP8: return linear_of<CodeKernel<Fp8Code>, Blocks::MOST>(worker, w, rows, sink);
    case FP4: return linear_of<CodeKernel<FourBitCode<true>>, Blocks::MOST>(worker, w, rows, sink);
    case GROUPED_INT4: return linear_of<CodeKernel<FourBitCode<false>>, Blocks::MOST>(worker, w, rows, sink);
    default: return linear_of<CodeKernel<Int8Code>, Blocks::MOST>(worker, w, rows, sink);
  }
}

}  // namespace sametoken
