//! How `box_gemm` cuts rows, steps and the packed weight, as its kernels' files say.

use super::machine::{Call, Pointer};

/// Residues along width that a list has room for.
const MOST_STRIDE: i64 = 16;

/// One axis of the weight, and the offsets at which any residue has a tap.
pub struct Along {
    pub kernel: i64,
    pub stride: i64,
    pub dilation: i64,
    pub offsets: i64,
    pub apart: i64,
}

impl Along {
    pub fn new(call: &Call<'_>, axis: &str) -> Along {
        let int = |name: &str| call.int(&format!("{axis}_{name}"));
        let (kernel, stride, dilation) = (int("kernel"), int("stride"), int("dilation"));
        Along { kernel, stride, dilation, offsets: int("offsets"), apart: int("apart") }
    }

    /// The tap of a residue at an offset, if there are such an offset and tap.
    pub fn tap(&self, residue: i64, offset: i64) -> Option<i64> {
        let far = offset * self.apart * self.stride + residue;
        (0..self.kernel).find(|tap| offset < self.offsets && tap * self.dilation == far)
    }
}

/// How rows, steps and the packed weight are cut: what both kernels are told.
pub struct Layout {
    pub axes: [Along; 3],
    pub channels: i64,
    pub classes: i64,
    pub residues: i64,
    pub residue_list: i64,
    pub types: i64,
    /// Tiles of 16 rows.
    pub tiles: i64,
    pub pair_w: bool,
    /// Units along width; panels of a chunk, and pairs of these.
    pub units: i64,
    pub panels: i64,
    pub pairs: i64,
    /// Elements of 16 bytes, and parts of a number.
    pub e: i64,
    pub parts: i64,
}

/// What a row of a row block is: a channel of the block and residues along the axes.
pub struct Row {
    pub channel: i64,
    pub residues: [i64; 3],
    pub here: bool,
}

impl Layout {
    pub fn new(call: &Call<'_>, tiles: i64, packed: Pointer) -> Layout {
        let axes = ["d", "h", "w"].map(|axis| Along::new(call, axis));
        let [channels, classes, types, residues, residue_list] =
            call.ints(["channels", "classes", "types", "residues", "residue_list"]);
        let [panels, pair_w] = call.ints(["chunk_panels", "pair_w"]);
        assert!([0, 1].contains(&pair_w) && (pair_w == 1 || panels % 2 == 0), "{panels} panels in pairs");
        let pair_w = pair_w == 1;
        let units = if pair_w { (axes[2].offsets + 1) / 2 } else { axes[2].offsets };
        let pairs = if pair_w { panels } else { panels / 2 };
        assert!(classes * residues * channels <= 16 * tiles, "{classes}x{residues}x{channels} rows");
        assert!(residues <= MOST_STRIDE && axes[2].stride <= MOST_STRIDE);
        let (e, parts) = (16 / packed.width as i64, if call.size("KIND") == 3 { 2 } else { 1 });
        Layout {
            axes,
            channels,
            classes,
            residues,
            residue_list,
            types,
            tiles,
            pair_w,
            units,
            panels,
            pairs,
            e,
            parts,
        }
    }

    /// The residue along width of that number among those that have taps.
    pub fn residue(&self, number: i64) -> i64 {
        self.residue_list >> (4 * number) & 15
    }

    pub fn row(&self, kind: i64, row: i64) -> Row {
        let (of_class, channel) = (row / self.channels, row % self.channels);
        let (local, number) = (of_class / self.residues, of_class % self.residues);
        let class = kind * self.classes + local;
        let [d_stride, h_stride] = [self.axes[0].stride, self.axes[1].stride];
        let residues = [class / h_stride, class % h_stride, self.residue(number)];
        Row { channel, residues, here: local < self.classes && class < d_stride * h_stride }
    }

    /// The offset along width that unit `half` of a step has.
    pub fn offset_w(&self, unit: i64, half: i64) -> i64 {
        if self.pair_w { 2 * unit + half } else { unit }
    }

    /// The panel, of a chunk's, that unit `half` of a step has.
    pub fn panel(&self, pair: i64, half: i64) -> i64 {
        if self.pair_w { pair } else { 2 * pair + half }
    }

    pub fn mask_count(&self) -> i64 {
        self.types * (self.axes[0].offsets + self.axes[1].offsets) + self.units
    }

    /// Bit i: whether a row of tile i has a tap. For each type and offset along depth, the same along height,
    /// then for each unit along width.
    pub fn masks(&self) -> Vec<i64> {
        let [depth, height, width] = &self.axes;
        let mask = |hit: &dyn Fn(i64) -> bool| {
            (0..16 * self.tiles).filter(|&row| hit(row)).fold(0, |mask, row| mask | 1 << (row / 16))
        };
        let along = |axis: &Along, at: usize, kind: i64, offset: i64| {
            mask(&|row| {
                let row = self.row(kind, row);
                row.here && axis.tap(row.residues[at], offset).is_some()
            })
        };
        let mut masks = Vec::new();
        for (at, axis) in [depth, height].into_iter().enumerate() {
            for kind in 0..self.types {
                masks.extend((0..axis.offsets).map(|offset| along(axis, at, kind, offset)));
            }
        }
        // Those along width are of all types.
        let rows = self.classes * self.residues * self.channels;
        masks.extend((0..self.units).map(|unit| {
            let hit =
                |row: i64, half| width.tap(self.row(0, row).residues[2], self.offset_w(unit, half)).is_some();
            mask(&|row| row < rows && (hit(row, 0) || self.pair_w && hit(row, 1)))
        }));
        masks
    }

    /// The steps of a type: offsets along depth and height, the unit along width, and the tiles that take
    /// part.
    pub fn steps(&self, kind: i64, masks: &[i64]) -> Vec<([i64; 3], i64)> {
        let [d, h] = [self.axes[0].offsets, self.axes[1].offsets];
        let all =
            (0..d * h * self.units).map(|at| [at / (h * self.units), at / self.units % h, at % self.units]);
        let at = |index: i64| masks[index as usize];
        let tiles = |[md, mh, unit]: [i64; 3]| {
            at(kind * d + md) & at(self.types * d + kind * h + mh) & at(self.types * (d + h) + unit)
        };
        all.map(|step| (step, tiles(step))).filter(|&(_, tiles)| tiles != 0).collect()
    }

    /// Tiles of 512 bytes of a row block, of a part.
    pub fn tiles_of_block(&self, chunks: i64) -> i64 {
        self.axes[0].offsets * self.axes[1].offsets * self.units * chunks * self.pairs * self.tiles
    }

    /// What an element of a lane's 16 bytes is for the matrix instructions: the row of its tile, the unit of
    /// the step and the channel of that one's panel.
    pub fn fragment(&self, lane: i64, element: i64) -> [i64; 3] {
        let quarter = self.e / 4;
        let (register, within) = (element / quarter, element % quarter);
        [lane / 4 + 8 * (register % 2), register / 2, lane % 4 * quarter + within]
    }
}

/// The layout that a launch of either kernel is told.
pub fn layout(call: &Call<'_>) -> Layout {
    match call.kernel() {
        "box_pack_weight" => Layout::new(call, call.int("tiles"), call.pointer("out")),
        _ => Layout::new(call, call.size("MT"), call.pointer("a")),
    }
}
