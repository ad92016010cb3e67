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

#define HFA_ENTRY(name, Call) HFA_NAMESPACE::name,
extern const Kernels HFA_TABLE = {refused, HFA_KERNELS(HFA_ENTRY)};
