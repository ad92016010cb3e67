#include "../kernels.h"

#define HFA_ENTRY(name, Call) HFA_NAMESPACE::name,
extern const Kernels HFA_TABLE = {HFA_KERNELS(HFA_ENTRY)};
