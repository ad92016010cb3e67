// Threads. They are those of torch's OpenMP pool (the same libgomp), so that two pools do not compete for the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif

// Whether this process was forked. A forked child lacks the threads of the pool and would wait for them for ever.
extern std::atomic<bool> hfa_forked;

namespace {

// Calls f(task) for each task in 0..tasks-1 on at most `threads` threads. A thread that is ready takes the next task.
template <class Function>
inline void parallel_for(int64_t tasks, [[maybe_unused]] int threads, const Function& f) {
#if defined(_OPENMP)
  if (tasks > 1 && threads > 1 && !hfa_forked.load(std::memory_order_relaxed) && !omp_in_parallel()) {
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(static_cast<int>(tasks < threads ? tasks : threads))
    for (int64_t task = next.fetch_add(1, std::memory_order_relaxed); task < tasks;
         task = next.fetch_add(1, std::memory_order_relaxed))
      f(task);
    return;
  }
#endif
  for (int64_t task = 0; task < tasks; ++task) f(task);
}

// Returns memory of the calling thread, aligned to 64 bytes. It is kept between calls and only grows.
// Each use has its own `Tag`, so that two buffers of a call are never the same memory.
template <class Tag>
inline void* scratch(size_t bytes) {
  struct Buffer {
    void* memory = nullptr;
    size_t size = 0;
    ~Buffer() { std::free(memory); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < bytes) {
    std::free(buffer.memory);
    buffer.size = 0;
    buffer.memory = std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
    if (!buffer.memory) throw std::bad_alloc();
    buffer.size = (bytes + 4095) / 4096 * 4096;
  }
  return buffer.memory;
}

}  // namespace
