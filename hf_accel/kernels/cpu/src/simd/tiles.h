// Tiles: eight registers of 16 rows of 64 bytes, and the products of two of them. The CPU has them (AMX), or plain
// loops do the same as its instructions, so that kernels over tiles can be tested on every machine.
//
//   Tiles       gives the calling thread the tiles while the object lives. What they held is lost with it
//   load_tile   row i of the tile from p + i * stride; the stride is in bytes
//   store_tile  row i of the tile to p + i * stride
//   dot_int8    C[m, n] += sum over k of the four products of word [m, k] of A with word [k, n] of B, where a word is
//               four signed bytes. The sums of int32 are exact
//   dot_bf16    the same for words of two bf16 and sums of floats. The products of the first halves are added up from
//               0, each rounded once, and so are those of the second; the sum of both is added to C. Denormals count
//               as zero, and all roundings are to nearest, ties to even
//   refused_tiles  asks the system for the tiles; a clause that says why this process does not get them, or null
//
// The template arguments are the numbers of the registers, from 0 to 7.
#pragma once

#include <cstdint>

namespace {

constexpr int64_t TILE_HEIGHT = 16;  // rows of a tile
constexpr int64_t TILE_WIDTH = 64;   // bytes of a row
constexpr int64_t TILE_BYTES = TILE_HEIGHT * TILE_WIDTH;
constexpr int64_t TILE_WORDS = TILE_WIDTH / 4;  // words of a row
constexpr int64_t PAIR = 2 * TILE_HEIGHT;       // rows, and columns, of the four tiles that a kernel sums at once

}  // namespace

#if defined(HFA_AMX)
#include "amx.h"
#else
#include "portable_tiles.h"
#endif
