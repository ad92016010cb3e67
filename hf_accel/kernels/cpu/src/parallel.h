// Threads. They are those of torch's OpenMP pool, so that two pools do not compete for the cores. team.cpp has them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

// Whether this process was forked. A forked child lacks the threads of the pool and would wait for them for ever.
extern std::atomic<bool> hfa_forked;

// Calls f(data) on `threads` threads, the caller among them, and returns when all have returned. Null, if there is only
// the caller.
//
// All calls must want the same number: GNU's runtime ends the threads that a smaller team has no use for, and starts new
// ones for the next team. With 8 threads that took 0.4 ms, as long as a product of 16 rows with 12 MB of weights.
using Team = void (*)(void (*f)(void* data), void* data, int threads);
extern Team hfa_team;
extern int (*hfa_in_parallel)();  // whether the caller is itself one of several; set if there is a team

namespace {

// Calls f(task) for each task in 0..tasks-1 on `threads` threads. A thread that is ready takes the next task, and one
// that finds none returns.
template <class Function>
inline void parallel_for(int64_t tasks, int threads, const Function& f) {
  struct Work {
    std::atomic<int64_t> next;
    const int64_t tasks;
    const Function& f;
  };
  if (tasks > 1 && threads > 1 && hfa_team && !hfa_forked.load(std::memory_order_relaxed) && !hfa_in_parallel()) {
    Work work = {{0}, tasks, f};
    const auto take_tasks = [](void* data) {
      Work& shared = *static_cast<Work*>(data);
      for (int64_t task = shared.next.fetch_add(1, std::memory_order_relaxed); task < shared.tasks;
           task = shared.next.fetch_add(1, std::memory_order_relaxed))
        shared.f(task);
    };
    hfa_team(take_tasks, &work, threads);
    return;
  }
  for (int64_t task = 0; task < tasks; ++task) f(task);
}

// Returns memory of the calling thread, aligned to 64 bytes. It is kept between calls and only grows.
// Each use has its own `Tag`, so that two buffers of a call are never the same memory.
template <class Tag>
inline void* scratch(std::size_t bytes) {
  constexpr std::align_val_t LINE{64};
  struct Buffer {
    void* memory = nullptr;
    std::size_t size = 0;
    void free() {
      ::operator delete(memory, LINE);
      memory = nullptr;
      size = 0;
    }
    ~Buffer() { free(); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    const std::size_t size = (bytes + 4095) / 4096 * 4096;
    buffer.free();
    buffer.memory = ::operator new(size, LINE);  // or throws std::bad_alloc
    buffer.size = size;
  }
  return buffer.memory;
}

}  // namespace
