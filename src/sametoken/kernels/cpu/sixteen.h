// Keys or values of a task, sixteen at a time, from cache pages where they lie.
//
// They come in the order of their positions, in blocks of 16 aligned to position 0: the committed prefix, then each tree
// node's own path as if it stood side by side.
#pragma once
#include <algorithm>

#include "tasks.h"

namespace sametoken {

// Where sixteen stored vectors of a head lie, and what their codes are to be multiplied with.
struct Sixteen {
  const char* at[LANES];
  float scale[LANES];
  int64_t slot[LANES];
};

// Keys or values of the positions first .. last, where `first` is a multiple of 16, and what the same thread is likely to
// read after them: those from `next` on.
struct Stretch {
  const Plane& plane;
  int64_t first, last;
  const Plane& next_plane;
  int64_t next;
};

class Reader {
 public:
  static constexpr int SIDE = REGISTERS == 32 ? 2 : 1;  // blocks of 16 keys side by side

  Reader(const Cache& cache, const Heads& heads, const Places& places)
      : cache_(cache), heads_(heads), places_(places), bytes_(heads.size * kv_bytes(cache.form)) {}

  // Hands a stretch to visit(key head of the task, first node, nodes, position, Sixteen[count], count). Up to the committed
  // length all nodes of a block have the same; past it each tree node has its own.
  template <class Visit>
  void walk(const Attending& task, const Stretch& all, Visit visit) const {
    const Block& block = task.block;
    if (block.chain) return pass(task, all, 0, block.nodes, all.last, visit);
    int64_t shared = std::max(all.first, block.span->starts[block.row] / LANES * LANES);
    pass(task, {all.plane, all.first, std::min(shared, all.last), all.next_plane, all.next}, 0, block.nodes, shared, visit);
    for (int n = 0; n < block.nodes; n++) {
      int64_t end = places_.position[size_t(block.token + n)] + 1;
      pass(task, {all.plane, shared, std::min(end, all.last), all.next_plane, all.next}, n, 1, end, visit);
    }
  }

  // Keys as products with queries read them: [word][vector], codes float8_e4m3fn as bfloat16 numbers.
  void turn(const Sixteen& keys, uint32_t* turned) const {
    int words = heads_.size / 2;
    if (cache_.form == KV_BF16) return turn(keys.at, words, turned);
    uint32_t* codes = turned + (cache_.form == KV_INT8 ? 0 : words / 2 * LANES);
    turn(keys.at, words / 2, codes);
    if (cache_.form == KV_INT8) {
      for (int i = 0; i < words / 2 * LANES; i++) turned[i] ^= 0x80808080;  // as load_int8 wants them
      return;
    }
    for (int word = 0; word < words / 2; word++) {  // a word's bytes 0 and 2, then 1 and 3, as the query has them
      Pairs bytes = load_pairs(codes + word * LANES);
      store_pairs(turned + 2 * word * LANES, any_fp8<0>(bytes));
      store_pairs(turned + (2 * word + 1) * LANES, any_fp8<1>(bytes));
    }
  }

 private:
  static constexpr int AHEAD = 4;  // blocks of 16 keys

  // The same of some nodes; positions from `end` on repeat a key that is there, nobody sees them.
  template <class Visit>
  void pass(const Attending& task, const Stretch& all, int node, int nodes, int64_t end, Visit visit) const {
    Sixteen rows[SIDE];
    const char* ahead[SIDE];
    for (int64_t key = all.first; key < all.last; key += SIDE * LANES) {
      int count = 0;
      for (; count < SIDE && key + count * LANES < all.last; count++) {
        locate(task.block, node, key + count * LANES, end, rows[count]);
        int64_t over = key + (count + AHEAD) * LANES - all.last;
        ahead[count] = over < 0 ? address(task, all.plane, over + all.last)
                                : address(task, all.next_plane, all.next + over / LANES * LANES);
      }
      for (int head = 0; head < task.heads; head++) {
        for (int b = 0; b < count; b++) {
          aim(all.plane, task.head + head, rows[b]);
          if (ahead[b] != nullptr) prefetch(ahead[b], head, task.heads);
        }
        visit(head, node, nodes, key, rows, count);
      }
    }
  }

  // Whether 16 keys from `key` on lie side by side in a page, in the order of their positions.
  bool together(const Block& block, int64_t key, int64_t end) const {
    return cache_.page_size % LANES == 0 && key + LANES <= (block.chain ? end : std::min(end, block.span->starts[block.row]));
  }

  void locate(const Block& block, int node, int64_t key, int64_t end, Sixteen& rows) const {
    const Span& span = *block.span;
    int64_t start = span.starts[block.row];
    const std::vector<int32_t>& path = places_.path[size_t(block.token + node)];
    if (together(block, key, end)) {
      int64_t slot = slot_of(cache_, span.rows[block.row], key);
      for (int i = 0; i < LANES; i++) rows.slot[i] = slot + i;
      return;
    }
    for (int i = 0; i < LANES; i++) {
      int64_t position = std::min(key + i, end - 1);
      int64_t index = block.chain || position < start ? position : start + path[size_t(position - start)];
      rows.slot[i] = slot_of(cache_, span.rows[block.row], index);
    }
  }

  void aim(const Plane& plane, int head, Sixteen& rows) const {
    const char* vectors = plane.vectors + head * bytes_;
    for (int i = 0; i < LANES; i++) rows.at[i] = vectors + rows.slot[i] * (heads_.key * bytes_);
    if (plane.scales == nullptr) return;
    const float* scales = plane.scales + head * cache_.slots;
    for (int i = 0; i < LANES; i++) rows.scale[i] = scales[rows.slot[i]];
  }

  // Where 16 committed keys or values from `key` on lie, of the first head of a task; null where not side by side.
  const char* address(const Attending& task, const Plane& plane, int64_t key) const {
    const Span& span = *task.block.span;
    if (cache_.page_size % LANES != 0 || key + LANES > span.starts[task.block.row]) return nullptr;
    int64_t slot = slot_of(cache_, task.block.span->rows[task.block.row], key);
    return plane.vectors + (slot * heads_.key + task.head) * bytes_;
  }

  // Asks for one of `parts` parts of 16 keys or values of `parts` heads: those of some heads lie too far apart for the
  // processor to foresee.
  void prefetch(const char* at, int part, int parts) const {
    int begin = LANES * part / parts, end = LANES * (part + 1) / parts;
    at += begin * heads_.key * bytes_;
    for (int i = begin; i < end; i++, at += heads_.key * bytes_)
      for (int64_t byte = 0; byte < parts * bytes_; byte += 64) fetch_early(at + byte);
  }

  // Words of sixteen vectors of `words` words, turned: [word][vector].
  static void turn(const char* const* vectors, int words, uint32_t* turned) {
    for (int word = 0; word < words; word += LANES) {
      const uint32_t* at[LANES];
      uint32_t rest[LANES][LANES];
      for (int i = 0; i < LANES; i++) {
        at[i] = reinterpret_cast<const uint32_t*>(vectors[i]) + word;
        if (word + LANES <= words) continue;
        std::copy(at[i], at[i] + (words - word), rest[i]);  // what follows a head may not be ours to read
        at[i] = rest[i];
      }
      transpose16(at, turned + word * LANES);
    }
  }

  const Cache& cache_;
  const Heads& heads_;
  const Places& places_;
  const int64_t bytes_;  // of a vector
};

}  // namespace sametoken
