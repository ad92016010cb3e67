// The C interface: what library.py calls through ctypes. Pointers and sizes only; arguments are checked in Python.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <exception>

#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "kernels.h"

#define HFA_LEVEL(name) extern const Kernels hfa_table_##name;
#include "levels.inc"
#undef HFA_LEVEL

std::atomic<bool> hfa_forked{false};

namespace {

const Kernels* active = nullptr;
thread_local char message[256];

struct AtFork {
#if !defined(_WIN32)
  AtFork() { pthread_atfork(nullptr, nullptr, [] { hfa_forked = true; }); }
#endif
} at_fork;

// Runs f and returns 0, or keeps the message of what it threw and returns 1.
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

#define HFA_API __attribute__((visibility("default")))

// Use the kernels of a level of hardware.ISA_LEVELS; 0, or 1 if this build has none of that name.
HFA_API int hfa_select(const char* level) {
#define HFA_LEVEL(name) \
  if (!std::strcmp(level, #name)) { active = &hfa_table_##name; return 0; }
#include "levels.inc"
#undef HFA_LEVEL
  return 1;
}

HFA_API const char* hfa_error() { return message; }

// call: the bytes of a LinearCall; copied, for they need not be aligned.
HFA_API int hfa_linear(const Linear* linear, const void* call) {
  const bool integers = linear->format == INT8 || linear->format == INT4;
  return guarded([&] {
    LinearCall c;
    std::memcpy(&c, call, sizeof c);
    (integers ? active->integer_linear : active->float_linear)(*linear, c);
  });
}

// Ask for large pages under memory that was not touched yet: streaming through weights then misses the address cache
// (TLB) once every 2 MB instead of every 4 KB. Advice only: without it all works the same.
HFA_API int hfa_large_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = 1u << 21, first = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
  return 0;
}

HFA_API int hfa_pack(const PackCall* call) {
  return guarded([&] { active->pack(*call); });
}

HFA_API int hfa_unpack(const PackCall* call) {
  return guarded([&] { active->unpack(*call); });
}

HFA_API int hfa_quantize_weight(QuantizeCall* call) {
  return guarded([&] { active->quantize_weight(*call); });
}

HFA_API int hfa_norm(const NormCall* call) { return guarded([&] { active->norm(*call); }); }
HFA_API int hfa_rope(const RopeCall* call) { return guarded([&] { active->rope(*call); }); }
HFA_API int hfa_gated(const GatedCall* call) { return guarded([&] { active->gated(*call); }); }
HFA_API int hfa_argmax(const VocabularyCall* call) { return guarded([&] { active->argmax(*call); }); }
HFA_API int hfa_topk(const VocabularyCall* call) { return guarded([&] { active->topk(*call); }); }
// call: the bytes of an AttentionCall, of a WriteCall; copied, for they need not be aligned
HFA_API int hfa_attention(const void* call) {
  return guarded([&] {
    AttentionCall c;
    std::memcpy(&c, call, sizeof c);
    active->attention(c);
  });
}

HFA_API int hfa_write_pages(const void* call) {
  return guarded([&] {
    WriteCall c;
    std::memcpy(&c, call, sizeof c);
    active->write_pages(c);
  });
}

}  // extern "C"
