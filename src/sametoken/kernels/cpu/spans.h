// The trees of a forward over cache pages: where each node stands and what it sees.
#pragma once
#include <algorithm>
#include <vector>

#include "kv_codes.h"

namespace sametoken {

// Keys or values of one layer.
struct Plane {
  char* vectors;  // [slots][kv heads][size] numbers or codes
  float* scales;  // [kv heads][slots] of the codes, null for numbers
};

struct Cache {  // of one layer
  Plane keys, values;
  const int64_t* table;  // [rows][pages of a row] page numbers
  int64_t table_stride, page_size, slots;
  int32_t form;
};

// Trees of `total` nodes in `batch` rows, of which the last `nodes` are computed; all arrays contiguous.
struct Span {
  int32_t batch, nodes, total;
  const int64_t *rows, *starts;  // [batch] rows of the page table, and their committed lengths
  const uint8_t* ancestors;      // [batch][total][total] whether a node lies on another's path; null: all are chains
};

struct Heads {
  int32_t query, key, size;
  float scale, cap;  // of scores: what products are multiplied by, 0 for 1 / sqrt(size); the cap, 0 for none
  int groups() const { return query / key; }
};

inline int64_t slot_of(const Cache& cache, int64_t row, int64_t index) {
  return cache.table[row * cache.table_stride + index / cache.page_size] * cache.page_size + index % cache.page_size;
}

// Stores a vector of `heads.size` numbers.
inline void write(const Cache& cache, const Heads& heads, const Plane& plane, int64_t slot, int head, const bf16* x) {
  char* to = plane.vectors + (slot * heads.key + head) * heads.size * kv_bytes(cache.form);
  if (cache.form == KV_BF16) std::memcpy(to, x, size_t(heads.size) * 2);
  else plane.scales[head * cache.slots + slot] = encode(cache.form, x, heads.size, to);
}

// The nodes that are computed, row by row: where each stands and what it sees past the committed prefix.
struct Places {
  std::vector<int64_t> position, slot;           // [tokens]
  std::vector<std::vector<int32_t>> path;        // [tokens] nodes on the path, root first; empty in rows that are chains
  std::vector<uint8_t> chain;                    // [rows of all spans]

  Places(const Cache& cache, const Span* spans, int count) {
    for (int s = 0; s < count; s++)
      for (int b = 0; b < spans[s].batch; b++) add(cache, spans[s], b);
  }

 private:
  void add(const Cache& cache, const Span& span, int b) {
    const uint8_t* ancestors = span.ancestors + int64_t(b) * span.total * span.total;
    bool straight = true;
    for (int n = 0; span.ancestors != nullptr && n < span.total && straight; n++)
      for (int m = 0; m <= n && straight; m++) straight = ancestors[n * span.total + m];
    chain.push_back(straight);
    for (int n = span.total - span.nodes; n < span.total; n++) {
      std::vector<int32_t> nodes;
      int64_t depth = n;
      if (!straight) {
        for (int m = 0; m <= n; m++)
          if (ancestors[n * span.total + m]) nodes.push_back(m);
        depth = int64_t(nodes.size()) - 1;
      }
      position.push_back(span.starts[b] + depth);
      slot.push_back(slot_of(cache, span.rows[b], span.starts[b] + n));
      path.push_back(std::move(nodes));
    }
  }
};

}  // namespace sametoken
