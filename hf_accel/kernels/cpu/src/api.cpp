// The C interface that library.py calls through ctypes. Arguments are checked in Python, not here.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "draft.h"
#include "kernels.h"

#define HFA_LEVEL(name) extern const Kernels hfa_table_##name;
#include "levels.inc"
#undef HFA_LEVEL

std::atomic<bool> hfa_forked{false};

namespace {

const Kernels* active = nullptr;
thread_local char message[256];

#if !defined(_WIN32)
struct AtFork {
  AtFork() { pthread_atfork(nullptr, nullptr, [] { hfa_forked = true; }); }
} at_fork;
#endif

// Runs f and returns 0. If f throws, stores the message and returns 1.
template <class Function>
int guarded(const Function& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, sizeof message, "%s", error.what());
    return 1;
  }
}

}  // namespace

extern "C" {

// The levels that were compiled. Who looks into the file finds them after this name, whatever it was compiled for.
#define HFA_LEVEL(name) #name " "
extern HFA_API const char hfa_levels[];
const char hfa_levels[] = "hfa_levels: "
#include "levels.inc"
    ;
#undef HFA_LEVEL

// Selects the kernels of a level of hardware.ISA_LEVELS. Returns 0; or 1, and hfa_error says why: the level was not
// compiled, or the system refuses what it needs.
HFA_API int hfa_select(const char* level) {
  const Kernels* chosen = nullptr;
#define HFA_LEVEL(name) \
  if (!std::strcmp(level, #name)) chosen = &hfa_table_##name;
#include "levels.inc"
#undef HFA_LEVEL
  const char* reason = chosen ? chosen->refused() : "it was not compiled";
  if (!reason) {
    active = chosen;
    return 0;
  }
  std::snprintf(message, sizeof message, "%s", reason);
  return 1;
}

HFA_API const char* hfa_error() { return message; }

// call: the bytes of the kernel's struct. They are copied, because they may not be aligned.
#define HFA_CALL(name, Call, run)                    \
  HFA_API int hfa_##name(const void* call) {         \
    return guarded([&] {                             \
      Call aligned;                                  \
      std::memcpy(&aligned, call, sizeof aligned);   \
      run;                                           \
    });                                              \
  }
#define HFA_KERNEL(name, Call) HFA_CALL(name, Call, active->name(aligned))
HFA_KERNELS(HFA_KERNEL)
HFA_CALL(layer, LayerCall, run_layer(*active, aligned))
HFA_CALL(draft, DraftCall, run_draft(*active, aligned))
#undef HFA_KERNEL
#undef HFA_CALL

// Returns the size of a kernel's struct, or of Linear, Matrix, LowRank, SampledTensor or LayerOp; -1 for another name.
HFA_API int64_t hfa_size_of(const char* name) {
#define HFA_SIZE(kernel, Call) \
  if (!std::strcmp(name, #kernel)) return sizeof(Call);
  HFA_KERNELS(HFA_SIZE)
  HFA_SIZE(Linear, Linear)
  HFA_SIZE(Matrix, Matrix)
  HFA_SIZE(LowRank, LowRank)
  HFA_SIZE(SampledTensor, SampledTensor)
  HFA_SIZE(layer, LayerCall)
  HFA_SIZE(draft, DraftCall)
#undef HFA_SIZE
  if (!std::strcmp(name, "LayerOp")) return LAYER_OP_SIZE;
  return -1;
}

}  // extern "C"
