// Products by the processor's matrix unit, at the price of reading the weights once for up to some dozen rows, and many times
// as fast as without it for the rows of a prompt.
//
// Weights lie as the other kernels read them. Rows lie in lines of 64 bytes, 16 rows side by side, see Rows. Sums are those
// of the unit, whatever rows are computed together: up to FEW rows take the same operations one by one, which reads
// memory faster.
#pragma once
#include <algorithm>

#include "rows.h"
#include "simd_amx.h"

#ifdef SAMETOKEN_MATRIX_UNIT
namespace sametoken {

// Weights of 64 bytes of a row's inputs for each of 16 outputs, a tile of 1 KB. [tile][in / 2][16][2] bfloat16.
struct PairLines {
  static constexpr int INPUTS = 32, FEW = 5;
  template <int SUMS, int ROWS, int WEIGHTS>
  static void multiply() { tile_dot2<SUMS, ROWS, WEIGHTS>(); }
  static Floats result(const Weight&, const Rows&, int, int, const float* sums) { return load(sums); }
};

// [tile][in / 4][16][4] bytes, each a signed weight + 128.
struct ByteLines {
  static constexpr int INPUTS = 64, FEW = 0;
  template <int SUMS, int ROWS, int WEIGHTS>
  static void multiply() { tile_dot4<SUMS, ROWS, WEIGHTS>(); }
  static Floats result(const Weight& w, const Rows& rows, int row, int at, const float* sums) {
    Ints sum = add_ints(load_ints(reinterpret_cast<const int32_t*>(sums)), spread_int(-INT8_OFFSET * rows.totals[row]));
    return mul(mul(as_floats(sum), spread(rows.scale[row])), load(static_cast<const float*>(w.scale) + at));
  }
};

template <class Lines>
class MatrixKernel {
 public:
  // How many rows are multiplied by a few tiles before the next tiles are: so many that their lines stay in a second-level
  // cache.
  static int panel(const Rows& rows) {
    int64_t fit = (1 << 20) / (rows.width / Lines::INPUTS * 64) / HEIGHT * HEIGHT;
    return int(std::clamp<int64_t>(fit, HEIGHT, PANEL));
  }

  // How many tiles are multiplied together.
  static constexpr int together(int rows) { return rows == 1 && Lines::FEW > 0 ? 4 : 2; }

  // The rows first .. end, which begin and end where blocks of 16 do or rows end, by N tiles from `tile` on.
  template <int N>
  static void product(const Weight& w, const Rows& rows, int first, int end, int tile, Sink sink) {
    if (N > 2 || end - first <= Lines::FEW) return few<Lines::FEW, N>(w, rows, first, end, tile, sink);
    if constexpr (N <= 2) by_unit<N>(w, rows, first, end, tile, sink);
  }

 private:
  template <int N>
  static void by_unit(const Weight& w, const Rows& rows, int first, int end, int tile, Sink sink) {
    alignas(64) static thread_local float sums[PANEL * N * LANES];
    TileShape shape;
    int lines = int(rows.width / Lines::INPUTS), passes = (end - first + HEIGHT - 1) / HEIGHT;
    int step = passes <= 2 ? lines : TOGETHER;
    int64_t size = int64_t(lines) * LINE, share = passes <= 2 ? 0 : padded(LINE / passes, 64);
    const uint8_t* data = w.data + tile * size;
    for (int line = 0; line < lines; line += step) {
      int stop = std::min(lines, line + step);
      const uint8_t* next = stop < lines ? data + stop * LINE : data + N * size;
      for (int pass = 0, row = first; row < end; pass++, row += HEIGHT) {
        int one = std::min(LANES, end - row), two = std::min(LANES, end - row - LANES);
        shape.set(one, std::max(two, 1));
        Pass some{rows.lines(row, w), rows.lines(row + LANES, w), one * 64, two * 64, line, stop, next + pass * share, share};
        float* at = sums + (row - first) * N * LANES;
        if (passes <= 2 && pass == 0) some.next = nullptr;
        if (two > 0) multiply<2, N>(data, size, some, at);
        else multiply<1, N>(data, size, some, at);
        if (stop == lines) give<N>(w, rows, row, one + std::max(two, 0), tile, at, sink);
      }
    }
  }

  static constexpr int LINE = 1024;  // bytes of a tile's weights
  static constexpr int HEIGHT = 2 * LANES;  // rows whose sums the unit holds at once
  static constexpr int PANEL = 8 * HEIGHT;
  static constexpr int TOGETHER = 8;        // lines of weights that serve all rows from a first-level cache

  // Two blocks of rows, bytes from one line to the next of each, and the lines that are multiplied. Where several such passes
  // follow each other, each asks for a share of every line of the weights that come next. Of one or two passes the first
  // asks shortly before it reads, and the second finds the weights in a second-level cache.
  struct Pass {
    const char *one, *two;
    int64_t one_step, two_step;
    int line, stop;
    const uint8_t* next;
    int64_t share;
  };

  // Adds to the sums [block of rows][N][16][16] of R blocks the products with N tiles, `size` bytes apart.
  template <int R, int N>
  static void multiply(const uint8_t* data, int64_t size, const Pass& pass, float* sums) {
    Lead lead(size, LINE, N);
    data += pass.line * LINE;
    const char *one = pass.one + pass.line * pass.one_step, *two = pass.two + pass.line * pass.two_step;
    each_sum<R, N>([&](auto at) { pass.line == 0 ? tile_clear<at()>() : tile_load<at()>(place<N>(sums, at())); });
    for (int line = pass.line; line < pass.stop; line++, data += LINE, one += pass.one_step, two += pass.two_step) {
      if (pass.next == nullptr) {
        int64_t ahead = lead.at(line);
        for (int n = 0; n < N; n++)
          for (int i = 0; i < LINE; i += 64) fetch(data + n * size + ahead + i);
      } else {
        const uint8_t* next = pass.next + (line - pass.line) * LINE;
        for (int n = 0; n < N; n++)
          for (int i = 0; i < pass.share; i += 64) fetch_early(next + n * size + i);
        for (int i = 0; i < LINE; i += 64) fetch(one + pass.one_step + i), fetch(two + pass.two_step + i);
      }
      tile_load<6>(data);
      tile_load<4>(one);
      if constexpr (N == 2) tile_load<7>(data + size);
      if constexpr (R == 2) tile_load<5>(two);
      each_sum<R, N>([](auto at) { Lines::template multiply<at(), 4 + at() / 2, 6 + at() % 2>(); });
    }
    each_sum<R, N>([&](auto at) { tile_store<at()>(place<N>(sums, at())); });
  }

  template <int N>
  static float* place(float* sums, int at) { return sums + (at / 2 * N + at % 2) * LANES * LANES; }

  template <int N>
  static void give(const Weight& w, const Rows& rows, int row, int count, int tile, const float* sums, Sink sink) {
    for (int n = 0; n < N; n++)
      for (int i = 0, at = (tile + n) * LANES; i < count; i++) {
        const float* from = sums + ((i / LANES * N + n) * LANES + i % LANES) * LANES;
        sink(row + i, at, biased(w, at, Lines::result(w, rows, row + i, at, from)));
      }
  }

  // The same sums for at most M rows, without tiles.
  template <int M, int N>
  static void few(const Weight& w, const Rows& rows, int first, int end, int tile, Sink sink) {
    if constexpr (M > 0) {
      if (end - first != M) return few<M - 1, N>(w, rows, first, end, tile, sink);
      Floats sums[M][N];
      add_lines(w, rows, first, tile, sums);
      for (int m = 0; m < M; m++)
        for (int n = 0, at = tile * LANES; n < N; n++, at += LANES) sink(first + m, at, biased(w, at, sums[m][n]));
    }
  }

  template <int M, int N>
  __attribute__((noinline)) static void add_lines(const Weight& w, const Rows& rows, int first, int tile, Floats (&sums)[M][N]) {
    Flushing flushing;
    int64_t lines = padded(w.in, 128) / Lines::INPUTS, size = lines * 1024;
    Lead lead(size, 64, N);
    const uint8_t* data = w.data + tile * size;
    const char* x = rows.lines(first, w);
    Floats total[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) total[m][n] = zeros();
    for (int64_t line = 0; line < lines; line++, x += 64 * M) {
      Floats even[M][N], odd[M][N];
      for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) even[m][n] = odd[m][n] = zeros();
      for (int k = 0; k < 16; k++, data += 64) {
        int64_t ahead = lead.at(line * 16 + k);
        Pairs weight[N];
        for (int n = 0; n < N; n++) {
          fetch(data + n * size + ahead);
          weight[n] = load_pairs(data + n * size);
        }
        for (int m = 0; m < M; m++) {
          Pairs input = spread_pair(dword(x + 64 * m + 4 * k));
          for (int n = 0; n < N; n++) {
            even[m][n] = fma(even_of(weight[n]), even_of(input), even[m][n]);
            odd[m][n] = fma(odd_of(weight[n]), odd_of(input), odd[m][n]);
          }
        }
      }
      for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) total[m][n] = add(total[m][n], add(even[m][n], odd[m][n]));
    }
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) sums[m][n] = total[m][n];
  }
};

}  // namespace sametoken
#endif
