// What nearly every kernel includes. The build precompiles it for each instruction set, where the compiler can: to read
// the intrinsics takes as long as to compile a small kernel.
#pragma once

#include <cmath>
#include <type_traits>

#include "../kernels.h"
#include "../parallel.h"
#include "any_dtype.h"
