#include "declarations.h"

extern const Kernels HFA_TABLE = {
    HFA_NAMESPACE::integer_linear,
    HFA_NAMESPACE::pack,
    HFA_NAMESPACE::unpack,
    HFA_NAMESPACE::quantize_weight,
    HFA_NAMESPACE::float_linear,
    HFA_NAMESPACE::norm,
    HFA_NAMESPACE::rope,
    HFA_NAMESPACE::gated,
    HFA_NAMESPACE::argmax,
    HFA_NAMESPACE::topk,
    HFA_NAMESPACE::attention,
    HFA_NAMESPACE::write_pages,
};
