// A team of threads that walks through phases together: tasks are taken one by one, a phase ends when all are done.
//
// Which thread takes a task never matters to a result. Nobody waits for a thread without a task: one that another busy
// process keeps from its core is late for some phases, which the others do meanwhile, and walks through them empty-handed.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <vector>

namespace foretoken {

class Team {
 public:
  Team(int threads, int phases) : threads_(threads), next_(size_t(threads) * size_t(phases)), done_(size_t(phases)) {}

  std::atomic<int>& next(int phase, int thread) { return next_[size_t(phase) * size_t(threads_) + size_t(thread)]; }
  std::atomic<int>& done(int phase) { return done_[size_t(phase)]; }

 private:
  int threads_;
  std::vector<std::atomic<int>> next_, done_;  // value-initialised: all zero
};

// One thread of a team. All threads call the same phases in the same order.
class Worker {
 public:
  Worker(Team& team, int threads, int index) : team_(team), threads_(threads), index_(index) {}

  int threads() const { return threads_; }

  // Runs `task(i)` for 0 <= i < count, spread over the team, and returns when all are done. A thread begins with a run of
  // neighbours of its own, so that what it reads lies in one piece, and then helps the others with theirs.
  template <class Task>
  void each(int count, Task task) {
    int mine = 0;
    for (int step = 0; step < threads_; step++) {
      int owner = (index_ + step) % threads_;
      int begin = share(count, owner), size = share(count, owner + 1) - begin;
      std::atomic<int>& next = team_.next(phase_, owner);
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < size; mine++) task(begin + i);
    }
    std::atomic<int>& done = team_.done(phase_++);
    if (mine > 0) done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; done.load(std::memory_order_acquire) < count; spins++)
      spins < PATIENCE ? _mm_pause() : void(sched_yield());
  }

 private:
  static constexpr int PATIENCE = 4000;

  int share(int count, int thread) const { return int(int64_t(count) * thread / threads_); }

  Team& team_;
  int threads_, index_, phase_ = 0;
};

// Runs `work(worker)` on `threads` threads of the process's OpenMP pool, which torch computes with too.
template <class Work>
void run_team(int threads, int phases, Work work) {
  Team team(threads, phases);
  if (threads <= 1) {
    Worker worker(team, 1, 0);
    work(worker);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    Worker worker(team, omp_get_num_threads(), omp_get_thread_num());
    work(worker);
  }
}

// Memory that grows and is kept by each thread that asks for it.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `bytes` bytes, aligned to a cache line; what was there before is lost.
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace foretoken
