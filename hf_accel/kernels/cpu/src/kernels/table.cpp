#include "../kernels.h"
#if defined(HFA_TILES)
#include "../simd/tiles.h"
#endif

namespace {

const char* refused() {
#if defined(HFA_TILES)
  return refused_tiles();
#else
  return nullptr;
#endif
}

}  // namespace

#define HFA_OWN(name, Call) HFA_NAMESPACE::name,
#define HFA_SHARED(name, Call) HFA_BASE::name,
#if defined(HFA_TILES) && defined(HFA_BF16)
#define HFA_ATTENTION HFA_OWN
#else
#define HFA_ATTENTION HFA_SHARED
#endif
extern const Kernels HFA_TABLE = {refused, HFA_LINEAR_KERNELS(HFA_OWN) HFA_ATTENTION_KERNELS(HFA_ATTENTION)
                                  HFA_OTHER_KERNELS(HFA_SHARED)};
