// What the ranks of one host exchange through memory that they share: sums, messages and rows of numbers, in rounds.
//
// Each rank has a counter of its rounds and two slots. In a round it fills a slot, counts, and waits until all others have
// counted. It fills the same slot again two rounds later: then every rank has counted the round between, which it does
// after it has read. A sum is made of the parts of all ranks, added in the order of the ranks, one number at a time.
#pragma once
#include <sched.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace sametoken {

struct Exchange {
  char* memory;        // [size] posts, then [size][2][slot] bytes, as `parallel/shared.py` maps it; at first all zero
  int64_t slot;        // bytes, a multiple of 64
  int32_t rank, size;
  uint32_t round;      // that this rank has counted last
  int32_t stopped;     // another thread sets it where a rank is gone: nothing is waited for any more
};

// A rank's counter, and how many others sleep until it moves.
struct alignas(128) Post {
  std::atomic<uint32_t> round, sleepers;
};

class Round {
 public:
  explicit Round(Exchange& exchange) : exchange_(exchange), round_(exchange.round + 1) {}

  char* slot(int rank) const {
    return exchange_.memory + int64_t(exchange_.size) * int64_t(sizeof(Post)) +
           (2 * int64_t(rank) + (round_ & 1)) * exchange_.slot;
  }

  // Counts the round, and waits for all others; false where a rank is gone.
  bool meet() const {
    Post& own = post(exchange_.rank);
    own.round.store(round_);
    exchange_.round = round_;
    if (own.sleepers.load() != 0) wake(own);
    for (int rank = 0; rank < exchange_.size; rank++)
      if (!wait_for(post(rank))) return false;
    return true;
  }

 private:
  // A rank is late by some microseconds where each has a core: sleeping would cost more. Where several share one, the
  // late rank needs the core.
  static constexpr int SPINS = 4000, YIELDS = 100;

  Post& post(int rank) const { return reinterpret_cast<Post*>(exchange_.memory)[rank]; }
  bool stopped() const { return __atomic_load_n(&exchange_.stopped, __ATOMIC_RELAXED) != 0; }

  bool wait_for(Post& other) const {
    for (int looks = 0;; looks++) {
      uint32_t seen = other.round.load(std::memory_order_acquire);
      if (int32_t(seen - round_) >= 0) return !stopped();
      if (looks < SPINS) relax();
      else if (stopped()) return false;
      else if (looks < SPINS + YIELDS) sched_yield();
      else sleep(other, seen);
    }
  }

#if defined(__linux__)
  static long futex(Post& post, int operation, uint32_t value, const timespec* limit) {
    return syscall(SYS_futex, &post.round, operation, value, limit, nullptr, 0);
  }
  static void wake(Post& own) { futex(own, FUTEX_WAKE, INT32_MAX, nullptr); }
  static void sleep(Post& other, uint32_t seen) {
    timespec limit{0, 100'000'000};  // then looks whether a rank is gone
    other.sleepers.fetch_add(1);
    futex(other, FUTEX_WAIT, seen, &limit);
    other.sleepers.fetch_sub(1);
  }
#else
  static void wake(Post&) {}
  static void sleep(Post&, uint32_t) { sched_yield(); }
#endif

  Exchange& exchange_;
  const uint32_t round_;
};

// Replaces numbers by their sums over all ranks.
inline void sum_over_ranks(Exchange& exchange, float* numbers, int64_t count) {
  int64_t most = exchange.slot / int64_t(sizeof(float));
  for (; count > 0; numbers += most, count -= most) {
    int64_t size = std::min(count, most);
    Round round(exchange);
    std::memcpy(round.slot(exchange.rank), numbers, size_t(size) * sizeof(float));
    if (!round.meet()) return;
    auto part = [&](int rank) { return reinterpret_cast<const float*>(round.slot(rank)); };
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
      Floats sum = load(part(0) + i);
      for (int rank = 1; rank < exchange.size; rank++) sum = add(sum, load(part(rank) + i));
      store(numbers + i, sum);
    }
    for (; i < size; i++) {
      float sum = part(0)[i];
      for (int rank = 1; rank < exchange.size; rank++) sum += part(rank)[i];
      numbers[i] = sum;
    }
  }
}

// Gives all ranks the bytes that rank 0 has.
inline void send_to_ranks(Exchange& exchange, char* data, int64_t count) {
  for (; count > 0; data += exchange.slot, count -= exchange.slot) {
    size_t size = size_t(std::min(count, exchange.slot));
    Round round(exchange);
    if (exchange.rank == 0) std::memcpy(round.slot(0), data, size);
    if (!round.meet()) return;
    if (exchange.rank != 0) std::memcpy(data, round.slot(0), size);
  }
}

// Puts the columns of all ranks side by side: `own` [rows][begins[rank + 1] - begins[rank]] of each rank into the first
// begins[size] numbers of the rows of `all` [rows][stride]; begins [size + 1]. `all` is null for a rank that wants none.
inline void gather_columns(Exchange& exchange, const float* own, const int64_t* begins, int64_t rows, int64_t stride,
                           float* all) {
  auto width = [&](int rank) { return begins[rank + 1] - begins[rank]; };
  int64_t widest = 0, most = exchange.slot / int64_t(sizeof(float)), mine = width(exchange.rank);
  for (int rank = 0; rank < exchange.size; rank++) widest = std::max(widest, width(rank));
  int64_t together = std::max<int64_t>(1, most / std::max<int64_t>(1, widest));  // rows of a round
  // Columns `from` up to at most `from + most` of a rank.
  auto part = [&](int rank, int64_t from) { return std::clamp<int64_t>(width(rank) - from, 0, most); };
  for (int64_t first = 0; first < rows; first += together)
    for (int64_t from = 0, end = std::min(rows, first + together); from < widest; from += most) {
      Round round(exchange);
      float* slot = reinterpret_cast<float*>(round.slot(exchange.rank));
      int64_t size = part(exchange.rank, from);
      for (int64_t r = first; r < end; r++) std::copy_n(own + r * mine + from, size, slot + (r - first) * size);
      if (!round.meet()) return;
      if (all == nullptr) continue;
      for (int rank = 0; rank < exchange.size; rank++) {
        const float* found = reinterpret_cast<const float*>(round.slot(rank));
        int64_t count = part(rank, from);
        for (int64_t r = first; r < end; r++)
          std::copy_n(found + (r - first) * count, count, all + r * stride + begins[rank] + from);
      }
    }
}

}  // namespace sametoken
