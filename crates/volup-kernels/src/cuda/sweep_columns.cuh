// Hopper's matrix instruction for the columns of `halo_sweep`.

#pragma once

#include "hopper.cuh"

#define NAMES_72 NAMES_64 ",%32,%33,%34,%35"
#define NAMES_144 NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define NAMES_160 NAMES_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_192 NAMES_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
MULTIPLY(72, "%36", "%37", "%38", "%39", N32(0), N32(4), N8(8))
MULTIPLY(144, "%72", "%73", "%74", "%75", N32(0), N32(4), N32(8), N32(12), N16(16))
MULTIPLY(192, "%96", "%97", "%98", "%99", N32(0), N32(4), N32(8), N32(12), N32(16), N32(20))
