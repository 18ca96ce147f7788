// How attention of a forward is divided into tasks: by rows, nodes, key heads, and where there are few nodes by keys.
//
// A result does not depend on it: keys are always attended to in chunks, whose results are joined in their order.
#pragma once
#include <algorithm>
#include <vector>

#include "spans.h"

namespace sametoken {

constexpr int64_t CHUNK = 1024;  // positions; the first chunk begins at 0

// Some nodes of one row that are attended for together.
struct Block {
  const Span* span;
  int row, token, nodes;  // row of the span; first of its tokens in the batch
  bool chain;
};

// A block, the key heads [head, head + heads) with all their query heads, and the keys.
struct Attending {
  Block block;
  int head, heads;
  int64_t chunk;         // of keys, whose results are parts to be joined; -1 for all keys
  int64_t part, chunks;  // the part of the block's first node, query head 0 and chunk 0; chunks of the row
};

// Parts of one token and key head that are to be joined.
struct Joining {
  int token, head;
  int64_t part;  // of its first query head and chunk 0; the parts of a query head lie side by side
  int64_t chunks;
};

class Plan {
 public:
  std::vector<Attending> tasks;
  std::vector<Joining> joins;  // after all tasks
  int64_t parts = 0;

  Plan(const Span* spans, int count, const Places& places, const Heads& heads, int threads) : heads_(heads) {
    int token = 0, row = 0, rows = 0;
    for (int s = 0; s < count; s++) rows += spans[s].batch;
    for (int s = 0; s < count; s++)
      for (int b = 0; b < spans[s].batch; b++, row++, token += spans[s].nodes) {
        Block whole{&spans[s], b, token, spans[s].nodes, places.chain[size_t(row)] != 0};
        if (whole.nodes > FEW) by_heads(whole);
        else by_keys(whole, (LEAST * threads + rows - 1) / rows);
      }
  }

 private:
  static constexpr int FEW = 16;       // nodes of a row that is divided by keys too
  static constexpr int QUERIES = 64;   // of a task, at most: the scores of a chunk then fit a second-level cache
  static constexpr int LEAST = 4;      // tasks of a thread, where there are so many

  int height() const { return std::max(1, QUERIES / heads_.groups()); }

  // Head by head, so that the blocks of a long prompt find a head's keys in a cache.
  void by_heads(const Block& whole) {
    for (int head = 0; head < heads_.key; head++)
      for (int n = 0; n < whole.nodes; n += height()) tasks.push_back({part_of(whole, n), head, 1, -1, 0, 0});
  }

  // Several heads at once, since those of a key lie side by side in memory, but at least `least` tasks.
  void by_keys(const Block& whole, int least) {
    int64_t chunks = (whole.span->starts[whole.row] + whole.span->total + CHUNK - 1) / CHUNK;
    for (int n = 0; n < whole.nodes; n += height()) {
      Block block = part_of(whole, n);
      int run = std::clamp(QUERIES / (block.nodes * heads_.groups()), 1, heads_.key);
      while (run > 1 && chunks * (heads_.key / run) < least) run = (run + 1) / 2;
      for (int64_t chunk = chunks > 1 ? 0 : -1; chunk < (chunks > 1 ? chunks : 0); chunk++)
        for (int head = 0; head < heads_.key; head += run)
          tasks.push_back({block, head, std::min(run, heads_.key - head), chunk, parts, chunks});
      if (chunks == 1) continue;
      for (int i = 0; i < block.nodes; i++)
        for (int head = 0; head < heads_.key; head++, parts += heads_.groups() * chunks)
          joins.push_back({block.token + i, head, parts, chunks});
    }
  }

  Block part_of(const Block& whole, int n) const {
    Block block = whole;
    block.token += n;
    block.nodes = std::min(height(), whole.nodes - n);
    return block;
  }

  const Heads heads_;
};

}  // namespace sametoken
