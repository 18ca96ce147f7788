// The rows that products read and write: plain bfloat16 while they are made, then in the form that a weight's format wants.
#pragma once
#include "linear.h"
#include "pointwise.h"

namespace sametoken {

// The rows that a linear reads: plain while they are being written, then in the form that the linear wants.
class Input {
 public:
  static size_t bytes(int64_t count, int64_t width) {
    int64_t wide = padded(width, 128);
    return size_t(count * wide * 3) + 2 * 64 + Rows::bytes(count, wide);
  }

  Input(char*& memory, int64_t count, int64_t width)
      : rows_(Rows::in(memory, count, padded(width, 128))) {
    take(memory, plain_, count * rows_.width);
    take(memory, bytes_, count * rows_.width);
    for (int64_t i = 0; i < count; i++) std::fill(row(i) + width, row(i) + rows_.width, bf16(0));
  }

  bf16* row(int64_t i) const { return plain_ + i * rows_.width; }
  int64_t stride() const { return rows_.width; }
  const Rows& rows() const { return rows_; }
  void finish(int i, const Weight& reader) const { rows_.set(i, row(i), reader, bytes_ + i * rows_.width); }

 private:
  Rows rows_;
  bf16* plain_ = nullptr;
  int8_t* bytes_ = nullptr;
};

inline void copy_cut(bf16* row, int at, Floats y, int size) {
  bf16 lanes[LANES];
  store_bf16(lanes, y);
  std::copy(lanes, lanes + std::min(LANES, size - at), row + at);
}

// A sink that stores bfloat16 rows of `size` numbers.
inline auto into(bf16* y, int64_t stride, int size) {
  return [=](int row, int at, Floats value) {
    if (at + LANES <= size) store_bf16(y + row * stride + at, value);
    else copy_cut(y + row * stride, at, value, size);
  };
}

// A sink that stores float32 rows of `size` numbers.
inline auto into_floats(float* y, int64_t stride, int size) {
  return [=](int row, int at, Floats value) {
    float* to = y + row * stride + at;
    if (at + LANES <= size) return store(to, value);
    float lanes[LANES];
    store(lanes, value);
    std::copy(lanes, lanes + (size - at), to);
  };
}

// A sink that adds to bfloat16 rows, times `scale`; each operation is rounded, as separate ones would.
inline auto onto(bf16* x, int64_t stride, float scale) {
  return [=](int row, int at, Floats value) {
    bf16* to = x + row * stride + at;
    bf16 rounded[LANES];
    store_bf16(rounded, value);
    if (scale != 1) scale_row(rounded, LANES, scale);
    store_bf16(to, add(load_bf16(to), load_bf16(rounded)));
  };
}

}  // namespace sametoken
