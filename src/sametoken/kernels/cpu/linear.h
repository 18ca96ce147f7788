// y = x W^T for packed weights, at the price of reading the weights once for any small number of rows.
//
// A weight lies in tiles of 16 outputs, and within a tile in steps of the inputs, so that a tile streams through a core.
// An unpacked step serves a block of up to 8 rows before the next is read, and rows of a block lie interleaved, one word
// of each at a time: two bfloat16, four bytes, or two of four bytes (SPLIT_WORDS in simd.h). An output is one sum in the order of its inputs: which rows and tiles
// are computed together never shows in it.
#pragma once
#include <algorithm>

#include "blocks.h"
#include "matrix.h"
#include "team.h"

namespace sametoken {

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
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) sums[m][n] = zeros();
    for (int64_t k = 0; k < steps; k++, data += BYTES, x += M) {
      int64_t ahead = lead.at(k);
      Pairs weight[N];
      UNROLLED for (int n = 0; n < N; n++) {
        fetch(data + n * size + ahead);
        weight[n] = unpack(data + n * size);
      }
      UNROLLED for (int m = 0; m < M; m++) {
        Pairs input = spread_pair(x[m]);
        UNROLLED for (int n = 0; n < N; n++) sums[m][n] = dot2(sums[m][n], weight[n], input);
      }
    }
    UNROLLED for (int n = 0; n < N; n++) {
      Floats scale = BYTES == 64 ? spread(1.0f) : load(static_cast<const float*>(w.scale) + (tile + n) * LANES);
      UNROLLED for (int m = 0; m < M; m++) out[m][n] = mul(sums[m][n], scale);
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
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) sums[m][n] = spread_int(-INT8_OFFSET * rows.totals[row + m]);
    for (int64_t k = 0; k < steps; k++, data += 64, x += SPLIT_WORDS * M) {
      int64_t ahead = lead.at(k);
      Quads weight[N];
      UNROLLED for (int n = 0; n < N; n++) {
        fetch(data + n * size + ahead);
        weight[n] = load_int8(data + n * size);
      }
      UNROLLED for (int m = 0; m < M; m++) {
        SplitQuad input = spread_split(x + m, M);
        UNROLLED for (int n = 0; n < N; n++) sums[m][n] = dot4(sums[m][n], weight[n], input);
      }
    }
    UNROLLED for (int n = 0; n < N; n++) {
      Floats scale = load(static_cast<const float*>(w.scale) + (tile + n) * LANES);
      UNROLLED for (int m = 0; m < M; m++) out[m][n] = mul(mul(as_floats(sums[m][n]), spread(rows.scale[row + m])), scale);
    }
  }
};

// [tile][in / 8][16][4] bytes; byte b of a lane holds inputs b (low nibble) and 4 + b, each a signed weight + 8.
struct Int4Kernel {
  // A tile is a short stream from memory: several at once cost more than the loads of one row that they save.
  static constexpr int together(int rows) { return rows == 1 ? 1 : rows == 2 && REGISTERS == 32 ? 4 : tiles_together(rows, 4); }
  static constexpr int PART = 32, SCALES_AHEAD = 16 * LANES;

  template <int M, int N>
  static void tile(const Weight& w, const Rows& rows, int row, int tile, Floats (&out)[M][N]) {
    int64_t width = padded(w.in, 128), size = width * LANES / 2, groups = width / w.group;
    int parts = w.group / PART;
    Lead lead(size, 64, N);
    const uint8_t* data = w.data + tile * size;
    const bf16* scales = static_cast<const bf16*>(w.scale) + tile * groups * LANES;
    const uint32_t* x = rows.block(row, w);
    const int32_t* until = rows.sums + row * (rows.width / PART) + (parts - 1);
    int32_t before[M] = {};
    Floats total[M][N];  // not `out`, which others could see, so that it stays in registers
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) total[m][n] = zeros();
    for (int64_t group = 0, k = 0; group < groups; group++, scales += LANES, until += parts) {
      Ints sums[M][N];
      UNROLLED for (int m = 0; m < M; m++) {
        int32_t end = until[m * (rows.width / PART)];
        UNROLLED for (int n = 0; n < N; n++) sums[m][n] = spread_int(8 * (before[m] - end));
        before[m] = end;
      }
      for (int i = 0; i < parts; i++, k += 4, data += 4 * 64, x += 8 * M) add_part(data, size, lead, k, x, sums);
      UNROLLED for (int n = 0; n < N; n++) {
        const bf16* at = scales + n * groups * LANES;
        if (group % 2 == 0) fetch(at + SCALES_AHEAD);
        Floats scale = load_bf16(at);
        UNROLLED for (int m = 0; m < M; m++) total[m][n] = add(total[m][n], mul(as_floats(sums[m][n]), scale));
      }
    }
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) out[m][n] = mul(total[m][n], spread(rows.scale[row + m]));
  }

 private:
  // Adds the products of PART inputs, which are four steps from step `k` on, of N tiles that are `size` bytes apart.
  template <int M, int N>
  static void add_part(const uint8_t* data, int64_t size, const Lead& lead, int64_t k, const uint32_t* x, Ints (&sums)[M][N]) {
    static_assert(Terms<4>::MOST >= PART / 4, "a part is gathered at once");
    Terms<4> terms[M][N];
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) terms[m][n].begin(sums[m][n]);
    for (int i = 0; i < 4; i++, data += 64, x += 2 * M) {
      Quads low[N], high[N];
      UNROLLED for (int n = 0; n < N; n++) {
        fetch(data + n * size + lead.at(k + i));
        Quads both = load_quads(data + n * size);
        low[n] = low_nibbles(both);
        high[n] = high_nibbles(both);
      }
      UNROLLED for (int m = 0; m < M; m++) {
        Quads first = spread_quad(x[m]), second = spread_quad(x[M + m]);
        UNROLLED for (int n = 0; n < N; n++) terms[m][n].add(low[n], first), terms[m][n].add(high[n], second);
      }
    }
    UNROLLED for (int m = 0; m < M; m++)
      UNROLLED for (int n = 0; n < N; n++) sums[m][n] = terms[m][n].total(sums[m][n]);
  }
};

template <class Kernel, int M, int N>
inline void tile_block(const Weight& w, const Rows& rows, int row, int tile, Sink sink) {
  Floats sums[M][N];
  Kernel::template tile<M, N>(w, rows, row, tile, sums);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      int at = (tile + n) * LANES;
      sink(row + m, at, biased(w, at, sums[m][n]));
    }
}

// Up to M rows over a few tiles, one by one.
template <class Kernel, int M>
inline void ragged(const Weight& w, const Rows& rows, int row, int count, int tile, int end, Sink sink) {
  if constexpr (M > 0) {
    if (count != M) return ragged<Kernel, M - 1>(w, rows, row, count, tile, end, sink);
    for (; tile < end; tile++) tile_block<Kernel, M, 1>(w, rows, row, tile, sink);
  }
}

// Some tiles of a weight.
struct Tiles {
  int first, end;
};

// N tiles from `tile` on, as far as they lie before `end`, for all rows, in blocks of M.
template <class Kernel, int M, int N>
inline void tiles_of_all(const Weight& w, const Rows& rows, int tile, int end, Sink sink) {
  for (int row = 0; row < rows.blocks.count; row += M) {
    int left = rows.blocks.height_at(row);
    if (left == M && tile + N <= end) tile_block<Kernel, M, N>(w, rows, row, tile, sink);
    else ragged<Kernel, M>(w, rows, row, left, tile, std::min(end, tile + N), sink);
  }
}

// One phase of blocks of M rows.
template <class Kernel, int M>
inline void linear_of(Worker& worker, const Weight& w, const Rows& rows, Tiles wanted, Sink sink) {
  if constexpr (M > 0) {
    if (rows.blocks.height != M) return linear_of<Kernel, M - 1>(worker, w, rows, wanted, sink);
    constexpr int N = Kernel::together(M);
    int tiles = wanted.end - wanted.first;
    auto task = [&](auto size) {
      return [&](int i) { tiles_of_all<Kernel, M, size()>(w, rows, wanted.first + i * size(), wanted.end, sink); };
    };
    // Several tiles at once make the most of a row's loads, unless that leaves a thread without a task.
    if (tiles >= 2 * N * worker.threads()) worker.each((tiles + N - 1) / N, task(std::integral_constant<int, N>()));
    else worker.each(tiles, task(std::integral_constant<int, 1>()));
  }
}

// One of `parts` nearly equal parts of the tiles, in blocks of M rows.
template <class Kernel, int M>
inline void part_of(const Weight& w, const Rows& rows, int part, int parts, Sink sink) {
  if constexpr (M > 0) {
    if (rows.blocks.height != M) return part_of<Kernel, M - 1>(w, rows, part, parts, sink);
    constexpr int N = Kernel::together(M);
    int tasks = (tiles_of(w) + N - 1) / N;
    for (int task = tasks * part / parts; task < tasks * (part + 1) / parts; task++)
      tiles_of_all<Kernel, M, N>(w, rows, task * N, tiles_of(w), sink);
  }
}

// What a kernel does for all rows: one phase of some tiles, and a part of all tiles by the calling thread alone.
template <class Kernel>
struct Product {
  static void phase(Worker& worker, const Weight& w, const Rows& rows, Tiles wanted, Sink sink) {
    linear_of<Kernel, Blocks::MOST>(worker, w, rows, wanted, sink);
  }

  static void part(const Weight& w, const Rows& rows, int part, int parts, Sink sink) {
    part_of<Kernel, Blocks::MOST>(w, rows, part, parts, sink);
  }
};

#ifdef SAMETOKEN_MATRIX_UNIT
template <class Lines>
struct Product<MatrixKernel<Lines>> {
  static void phase(Worker& worker, const Weight& w, const Rows& rows, Tiles wanted, Sink sink) {
    int tiles = wanted.end - wanted.first, most = MatrixKernel<Lines>::together(rows.blocks.count);
    int run = tiles >= 2 * most * worker.threads() ? most : 1, tasks = (tiles + run - 1) / run;
    int panel = MatrixKernel<Lines>::panel(rows), panels = (rows.blocks.count + panel - 1) / panel;
    worker.each(panels * tasks, [&](int i) {
      int tile = wanted.first + i % tasks * run;
      some(w, rows, i / tasks * panel, panel, {tile, std::min(tile + run, wanted.end)}, sink);
    });
  }

  static void part(const Weight& w, const Rows& rows, int part, int parts, Sink sink) {
    int pairs = (tiles_of(w) + 1) / 2, panel = MatrixKernel<Lines>::panel(rows);
    for (int row = 0; row < rows.blocks.count; row += panel)
      for (int pair = pairs * part / parts; pair < pairs * (part + 1) / parts; pair++)
        some(w, rows, row, panel, {2 * pair, std::min(2 * pair + 2, tiles_of(w))}, sink);
  }

 private:
  static void some(const Weight& w, const Rows& rows, int row, int panel, Tiles tiles, Sink sink) {
    int end = std::min(row + panel, rows.blocks.count);
    int tile = tiles.first;
    if constexpr (MatrixKernel<Lines>::together(1) == 4)
      if (tiles.end - tile == 4) return MatrixKernel<Lines>::template product<4>(w, rows, row, end, tile, sink);
    for (; tile + 2 <= tiles.end; tile += 2) MatrixKernel<Lines>::template product<2>(w, rows, row, end, tile, sink);
    if (tile < tiles.end) MatrixKernel<Lines>::template product<1>(w, rows, row, end, tile, sink);
  }
};
#endif

// Hands the product of a weight and so many rows to `use`.
template <class Use>
inline void with_product(const Weight& w, int count, Use use_product) {
  auto use = [&](auto kernel) { use_product(Product<decltype(kernel)>()); };
#ifdef SAMETOKEN_MATRIX_UNIT
  if (in_lines(w, count)) return w.format == BF16 ? use(MatrixKernel<PairLines>{}) : use(MatrixKernel<ByteLines>{});
#else
  (void)count;
#endif
  switch (w.format) {
    case BF16: return use(WideKernel<64>{});
    case INT8_WEIGHT_ONLY: return use(WideKernel<32>{});
    case INT8: return use(Int8Kernel{});
    case INT4: return use(Int4Kernel{});
    case FP8: return use(CodeKernel<Fp8Code>{});
    case FP4: return use(CodeKernel<Fp4Code>{});
    case GROUPED_INT4: return codes_of(w)->zero == nullptr ? use(CodeKernel<Int4Code>{}) : use(CodeKernel<ShiftedInt4Code>{});
    case GROUPED_INT8: return codes_of(w)->zero == nullptr ? use(CodeKernel<Int8Code<false>>{}) : use(CodeKernel<Int8Code<true>>{});
    case BLOCK_INT4: return use(BlockKernel<4, 32>{});
    case BLOCK_INT5: return use(BlockKernel<5, 32>{});
    case BLOCK_INT6: return use(BlockKernel<6, 16>{});
    default: return w.group == 16 ? use(BlockKernel<8, 16>{}) : use(BlockKernel<8, 32>{});
  }
}

// One phase: the outputs of some tiles of x W^T + bias, handed to sink(row, first output, 16 values), which cuts what is
// past the end.
inline void linear(Worker& worker, const Weight& w, const Rows& rows, Tiles tiles, Sink sink) {
  with_product(w, rows.blocks.count, [&](auto product) { product.phase(worker, w, rows, tiles, sink); });
}

// The same for every output.
inline void linear(Worker& worker, const Weight& w, const Rows& rows, Sink sink) {
  linear(worker, w, rows, Tiles{0, tiles_of(w)}, sink);
}

// One of `parts` parts of such a product, by the calling thread alone.
inline void linear_part(const Weight& w, const Rows& rows, int part, int parts, Sink sink) {
  with_product(w, rows.blocks.count, [&](auto product) { product.part(w, rows, part, parts, sink); });
}

}  // namespace sametoken
