// The matrix unit of x86-64 processors, AMX: eight tiles of 16 rows of 64 bytes. Only matrix.h uses it.
//
// A tile of sums has 16 outputs of each row. It grows by the product of a tile of rows, 64 bytes of each, and a tile of
// weights, 64 bytes of each of 16 outputs. Sums of bfloat16 products are made of such 32 inputs: the products of the even
// ones are added in their order, those of the odd ones too, then both sums to each other, and that to what was there.
// Numbers below the normal range count as zero. `even_of`, `odd_of` and `Flushing` are for doing the same without tiles.
#pragma once
#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define SAMETOKEN_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>

namespace sametoken {

// Whether the system lets this process use the unit; it must be asked once, and gives more room to saved registers then.
inline bool ask_for_matrix_unit() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Tiles 0 .. 3 are sums of 2 blocks of rows by 2 of outputs, 4 and 5 rows, 6 and 7 weights. They hold nothing at first,
// and no room in a thread's saved registers after `release`.
class TileShape {
 public:
  void set(int first, int second) {  // rows of both blocks
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    struct alignas(64) { uint8_t palette = 1, start = 0, rest[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int tile = 0; tile < 8; tile++) {
      bool of_first = tile < 2 || tile == 4, of_second = tile == 2 || tile == 3 || tile == 5;
      shape.bytes[tile] = 64;
      shape.rows[tile] = uint8_t(of_first ? first : of_second ? second : LANES);
    }
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~TileShape() { asm volatile("tilerelease"); }

 private:
  int first_ = 0, second_ = 0;
};

template <int TILE>
inline void tile_clear() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int TILE>
inline void tile_load(const void* at) {  // rows of 64 bytes, one after the other
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(int64_t(64)), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_store(void* at) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(int64_t(64)), "i"(TILE) : "memory");
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
inline bool ask_for_matrix_unit() { return false; }
}  // namespace sametoken
#endif
