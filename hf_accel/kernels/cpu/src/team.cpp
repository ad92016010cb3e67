// The threads of the OpenMP runtime that torch has loaded. The library is linked to none, because the runtime has another
// name and another interface on each system: openmp.py finds its functions, and hands them over here.
#include "kernels.h"
#include "parallel.h"

Team hfa_team = nullptr;
int (*hfa_in_parallel)() = nullptr;

namespace {

// GNU's interface, which LLVM's and Intel's runtimes have too, but not on Windows.
void (*gomp_parallel)(void (*f)(void*), void* data, unsigned threads, unsigned flags);

void gomp_team(void (*f)(void*), void* data, int threads) { gomp_parallel(f, data, static_cast<unsigned>(threads), 0); }

// LLVM's and Intel's interface: a call is named by the place in the source that it is made from.
struct Place {
  int32_t reserved, flags, reserved_too, reserved_as_well;
  const char* source;
};
Place place = {0, 2, 0, 0, ";hf_accel;parallel_for;0;0;;"};  // the flag says that a compiler could have made the call

using Outlined = void (*)(int32_t* thread, int32_t* thread_of_team, ...);
void (*kmpc_fork_call)(Place*, int32_t arguments, Outlined, ...);
void (*kmpc_push_num_threads)(Place*, int32_t thread, int32_t threads);
int32_t (*kmpc_global_thread_num)(Place*);

struct Job {
  void (*f)(void*);
  void* data;
};

void run_job(int32_t*, int32_t*, Job* job) { job->f(job->data); }

void kmpc_team(void (*f)(void*), void* data, int threads) {
  Job job = {f, data};
  kmpc_push_num_threads(&place, kmpc_global_thread_num(&place), threads);
  kmpc_fork_call(&place, 1, reinterpret_cast<Outlined>(reinterpret_cast<void*>(run_job)), &job);
}

template <class Function>
void set(Function& function, void* address) { function = reinterpret_cast<Function>(address); }

}  // namespace

extern "C" {

// parallel: GOMP_parallel; in_parallel: omp_in_parallel.
HFA_API void hfa_use_gomp(void* parallel, void* in_parallel) {
  set(gomp_parallel, parallel);
  set(hfa_in_parallel, in_parallel);
  hfa_team = gomp_team;
}

// __kmpc_fork_call, __kmpc_push_num_threads, __kmpc_global_thread_num and omp_in_parallel.
HFA_API void hfa_use_kmpc(void* fork_call, void* push_num_threads, void* global_thread_num, void* in_parallel) {
  set(kmpc_fork_call, fork_call);
  set(kmpc_push_num_threads, push_num_threads);
  set(kmpc_global_thread_num, global_thread_num);
  set(hfa_in_parallel, in_parallel);
  hfa_team = kmpc_team;
}

}  // extern "C"
