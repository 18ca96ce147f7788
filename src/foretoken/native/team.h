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
  explicit Team(int phases) : phases_(size_t(phases)) {}

  struct alignas(64) Phase { std::atomic<int> next{0}, done{0}; };
  Phase& phase(int index) { return phases_[size_t(index)]; }

 private:
  std::vector<Phase> phases_;
};

// One thread of a team. All threads call the same phases in the same order.
class Worker {
 public:
  Worker(Team& team, int threads) : team_(team), threads_(threads) {}

  int threads() const { return threads_; }

  // Runs `task(i)` for 0 <= i < count, spread over the team, and returns when all are done.
  template <class Task>
  void each(int count, Task task) {
    Team::Phase& phase = team_.phase(phase_++);
    int mine = 0;
    for (int i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < count; mine++) task(i);
    if (mine > 0) phase.done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < count; spins++)
      spins < PATIENCE ? _mm_pause() : void(sched_yield());
  }

 private:
  static constexpr int PATIENCE = 4000;
  Team& team_;
  int threads_, phase_ = 0;
};

// Runs `work(worker)` on `threads` threads of the process's OpenMP pool, which torch computes with too.
template <class Work>
void run_team(int threads, int phases, Work work) {
  Team team(phases);
  if (threads <= 1) {
    Worker worker(team, 1);
    work(worker);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    Worker worker(team, omp_get_num_threads());
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
