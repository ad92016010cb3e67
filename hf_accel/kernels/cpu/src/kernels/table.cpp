#include "declarations.h"

extern const Kernels HFA_TABLE = {
    HFA_NAMESPACE::integer_linear,
    HFA_NAMESPACE::float_linear,
};
