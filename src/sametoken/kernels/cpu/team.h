// A team of threads that walks through phases together: tasks are taken one by one, a phase ends when all are done.
//
// Which thread takes a task never matters to a result. Nobody waits for a thread without a task: one that another busy
// process keeps from its core is late for some phases, which the others do meanwhile, and walks through them empty-handed.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace sametoken {

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
      spins < PATIENCE ? relax() : void(sched_yield());
  }

 private:
  static constexpr int PATIENCE = 4000;

  int share(int count, int thread) const { return int(int64_t(count) * thread / threads_); }

  Team& team_;
  int threads_, index_, phase_ = 0;
};

// Threads that wait for work, shared by all calls of a process. They are no OpenMP threads: whoever closes an OpenMP region
// waits for all of its threads, and on a busy machine one of them may not even have begun. In return nobody else should
// compute on the same cores between calls: see `serial_torch` in threads.py.
class Pool {
 public:
  // The process's pool; a forked process has none of its parent's threads and begins anew. Never destroyed: its threads
  // live until the process ends.
  static Pool& instance() {
    static std::atomic<Pool*> pool{nullptr};
    static std::mutex made;
    Pool* found = pool.load(std::memory_order_acquire);
    if (found == nullptr || found->process_ != getpid()) {
      std::lock_guard<std::mutex> lock(made);
      found = pool.load();
      if (found == nullptr || found->process_ != getpid()) pool.store(found = new Pool);
    }
    return *found;
  }

  // Runs `work(worker)` on this thread and on those of `threads - 1` others that come in time. One call at a time has
  // the helpers; another that is made meanwhile does without.
  template <class Work>
  void run(int threads, int phases, Work work) {
    Turn turn(taken_);
    if (!turn.got) threads = 1;
    Team team(threads, phases);
    if (threads > 1) {
      grow(threads - 1);
      Job job{threads, &team, &work, [](void* what, Worker& worker) { (*static_cast<Work*>(what))(worker); }};
      current_.store(&job);
      call();
      Worker worker(team, threads, 0);
      work(worker);
      current_.store(nullptr);
      while (inside_.load() > 0) sched_yield();
    } else {
      Worker worker(team, 1, 0);
      work(worker);
    }
  }

 private:
  struct Job {
    int threads;
    Team* team;
    void* what;
    void (*run)(void*, Worker&);
  };

  // No mutex: pthread_mutex_trylock asks for glibc 2.34.
  struct Turn {
    explicit Turn(std::atomic<bool>& taken) : taken(taken), got(!taken.exchange(true, std::memory_order_acquire)) {}
    ~Turn() {
      if (got) taken.store(false, std::memory_order_release);
    }
    std::atomic<bool>& taken;
    const bool got;
  };

  void grow(int helpers) {
    for (int index = helpers_ + 1; index <= helpers; index++) std::thread(&Pool::help, this, index).detach();
    helpers_ = std::max(helpers_, helpers);
  }

  void call() {
    calls_.fetch_add(1);
    if (asleep_.load() == 0) return;
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }

  void help(int index) {
    for (uint64_t seen = 0;;) {
      wait_for_call(seen);
      seen = calls_.load();
      inside_.fetch_add(1);  // before the look at the job: who runs it waits for whoever may have seen it
      if (Job* job = current_.load(); job != nullptr && index < job->threads) {
        Worker worker(*job->team, job->threads, index);
        job->run(job->what, worker);
      }
      inside_.fetch_sub(1);
    }
  }

  // Watches for a moment, since a decoder is called again soon, then sleeps.
  void wait_for_call(uint64_t seen) {
    auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(200);
    while (calls_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 64 && calls_.load(std::memory_order_acquire) == seen; i++) relax();
      if (std::chrono::steady_clock::now() < end) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      asleep_.fetch_add(1);
      // wake_.wait(lock) by its handles: in C++ it is a symbol that asks for GCC 12's library.
      while (calls_.load() == seen) pthread_cond_wait(wake_.native_handle(), sleep_.native_handle());
      asleep_.fetch_sub(1);
    }
  }

  const pid_t process_ = getpid();
  std::atomic<bool> taken_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> calls_{0};
  std::atomic<Job*> current_{nullptr};
  std::atomic<int> inside_{0}, asleep_{0};
  int helpers_ = 0;
};

// Memory that grows and is kept by each thread that asks for it.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `bytes` bytes, aligned to a cache line; what was there before is lost.
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (std::max(bytes, size_ + size_ / 2) + 4095) / 4096 * 4096;  // contexts grow: not anew for every step
      data_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace sametoken
