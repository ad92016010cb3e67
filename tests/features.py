"""Tests of Triton's kernels, a case for each feature: first on a GPU, and all that is interpreted in a usual run."""

from __future__ import annotations

PAGED = "tests/unit/attention/test_paged.py"
PARITY = "tests/unit/linear/test_parity.py"
WRITE = "tests/unit/cache/test_write.py"
KERNELS = "tests/unit/kernels/triton"

# A case for each feature. The cases are those of all backends.
ATTENTION = [
    f"{PAGED}::test_equals_oracle[mixed-None-triton]",
    f"{PAGED}::test_equals_oracle[verify, ragged-3-triton by row]",
    f"{PAGED}::test_equals_oracle[more queries than keys-16-triton]",
    f"{PAGED}::test_equals_oracle[zero lengths-None-triton]",
    f"{PAGED}::test_equals_oracle[decode of very different lengths-None-triton]",
    f"{PAGED}::test_softcap_and_sinks[verify, ragged-both-3-triton]",
    f"{PAGED}::test_lse[mixed-sinks-triton]",
    f"{PAGED}::test_dtypes_groups_and_layouts[dims1-3-(8, 1)-torch.bfloat16-triton]",
    f"{PAGED}::test_dtypes_groups_and_layouts[dims2-16-(4, 2)-torch.float16-triton]",
    f"{PAGED}::test_quantized_pages[int8-mixed-None-torch.bfloat16-triton]",
    f"{PAGED}::test_quantized_pages[fp8-verify, ragged-3-torch.bfloat16-triton]",
    f"{PAGED}::test_quantized_pages[int4-mixed-None-torch.float32-triton]",
    f"{PAGED}::test_parts_over_disjoint_keys_merge[sinks-triton]",
    "tests/unit/attention/test_packed.py::test_equals_oracle[sinks-False-with a past-triton]",
    f"{WRITE}::test_bits_of_the_torch_path[triton-torch.bfloat16-PageDtypes(keys=torch.int8, values=torch.int8)]",
    f"{WRITE}::test_bits_of_the_torch_path[triton-torch.float16-PageDtypes(keys=torch.float8_e4m3fn, "
    "values=torch.float8_e4m3fn)]",
    f"{WRITE}::test_numbers_that_are_none[triton-torch.float32-PageDtypes(keys=torch.uint8, values=torch.uint8)]",
    f"{KERNELS}/test_attention.py",
]
LINEARS = [
    f"{PARITY}::test_zero_points[triton-float-272-256-128-torch.bfloat16]",
    f"{PARITY}::test_zero_points[triton by row-float-33-128-64-torch.float16]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-float-int8-257x48-torch.bfloat16-bias]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-float-int4-112x64-torch.float32-no-bias]",
    f"{PARITY}::test_unpack_returns_what_was_packed[triton-float-int4-64x384-torch.bfloat16]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-int8-int8-33x64-torch.bfloat16-bias]",
    f"{PARITY}::test_zero_points[triton-int8-33-128-64-torch.float16]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-float-fp8-257x48-torch.bfloat16-bias]",
    f"{PARITY}::test_as_the_float_layer_with_the_dequantized_weight[triton-fp8-fp8-64x384-torch.float16-bias]",
    f"{KERNELS}/test_quantized_linear.py",
    f"{KERNELS}/test_fp8_linear.py",
    f"{KERNELS}/test_torch_blocks.py",
    f"{KERNELS}/test_layer_parts.py",
]
