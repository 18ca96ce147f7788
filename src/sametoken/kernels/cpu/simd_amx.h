// The matrix unit of x86-64 processors, AMX: eight tiles of up to 16 rows of up to 64 bytes.
//
// A tile of sums has 16 outputs of each row. It grows by the product of a tile of rows, 64 bytes of each, and a tile of
// weights, 64 bytes of each of 16 outputs. Sums of bfloat16 products are made of such 32 inputs: the products of the even
// ones are added in their order, those of the odd ones too, then both sums to each other, and that to what was there.
// Numbers below the normal range count as zero. `even_of`, `odd_of` and `Flushing` are for doing the same without tiles.
#pragma once
#include <type_traits>

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define SAMETOKEN_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>

namespace sametoken {

constexpr bool MATRIX_UNIT = true;

// Whether the system lets this process use the unit; it must be asked once, and gives more room to saved registers then.
inline bool ask_for_matrix_unit() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// What tiles hold: 0 .. 3 are sums of two blocks of rows by two of outputs, 4 and 5 rows, 6 and 7 weights. A thread saves
// no tiles before and after.
class TileShape {
 public:
  // Rows of both blocks, and words of 32 bits of a row and of an output's weights, each at least 1. Tiles that held
  // something lose it where that changes.
  void set(int first, int second, int words = LANES) {
    if (first == first_ && second == second_ && words == words_) return;
    first_ = first, second_ = second, words_ = words;
    struct alignas(64) { uint8_t palette = 1, start = 0, rest[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int tile = 0; tile < 8; tile++) {
      bool of_first = tile < 2 || tile == 4, of_second = tile == 2 || tile == 3 || tile == 5;
      shape.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? 4 * words : 64);
      shape.rows[tile] = uint8_t(of_first ? first : of_second ? second : words);
    }
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  // A processor without the unit has no such instruction, and sets no shape.
  ~TileShape() {
    if (first_ != 0) asm volatile("tilerelease");
  }

 private:
  int first_ = 0, second_ = 0, words_ = 0;
};

// Calls use(tile) for the tiles of sums of R blocks of rows by N of outputs, with constants.
template <int R, int N, int AT = 0, class Use>
inline void each_sum(Use use) {
  if constexpr (AT < 2 * R) {
    if constexpr (AT % 2 < N) use(std::integral_constant<int, AT>());
    each_sum<R, N, AT + 1>(use);
  }
}

template <int TILE>
inline void tile_clear() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE>
inline void tile_load(const void* at, int64_t stride = 64) {  // bytes from one row to the next
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_store(void* at, int64_t stride = 64) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride), "i"(TILE) : "memory");
}
template <int SUMS, int ROWS, int WEIGHTS>
inline void tile_dot2() {  // bfloat16
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}
template <int SUMS, int ROWS, int WEIGHTS>
inline void tile_dot4() {  // signed rows by unsigned weights
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
}

inline Floats even_of(Pairs x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16)); }
inline Floats odd_of(Pairs x) { return _mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(int(0xffff0000)))); }

// 32 numbers of 16 bits of two vectors in pairs: the first 16 pairs, and the others.
inline void store_paired(const void* one, const void* two, void* low, void* high) {
  alignas(64) static constexpr uint16_t PLACES[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  __m512i a = _mm512_loadu_si512(one), b = _mm512_loadu_si512(two), places = _mm512_load_si512(PLACES);
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(a, places, b));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi16(a, _mm512_add_epi16(places, _mm512_set1_epi16(16)), b));
}

// While it lives, this thread's operations take numbers below the normal range for zero and give zero for them.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~Flushing() { _mm_setcsr(before_); }

 private:
  const unsigned before_;
};

}  // namespace sametoken
#else
namespace sametoken {
constexpr bool MATRIX_UNIT = false;
class TileShape {};
inline bool ask_for_matrix_unit() { return false; }
}  // namespace sametoken
#endif
