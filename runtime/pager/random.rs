//! Random numbers that are the same on every machine: splitmix64. G. L. Steele, D. Lea and C. H. Flood, "Fast
//! splittable pseudorandom number generators", OOPSLA 2014.

/// The increment of the generator's state.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijection of 64-bit numbers in which every output bit depends on all input bits.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The `n`th number of seed 0, counted from 0. Serves as a hash of `n`.
pub fn nth(n: u64) -> u64 {
    mix(n.wrapping_add(1).wrapping_mul(STEP))
}

/// A generator. Any seed is as good as another.
#[derive(Clone, Copy, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// A number from 0 up to but not including 1.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number from 0 up to but not including `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u32) -> u32 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u32
    }

    /// Shuffles the items.
    pub fn shuffle(&mut self, items: &mut [u32]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u32 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_reference() {
        // The reference implementation's first numbers for seed 1234567.
        let mut random = Random(1_234_567);
        let expected: [u64; 3] = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([(); 3].map(|()| random.next_u64()), expected);
        let mut first = Random(0);
        assert!((0..4).all(|n| first.next_u64() == nth(n)));
        assert_eq!(random.below(0), 0);
        assert!((0..1000).all(|_| random.below(3) < 3 && (0.0..1.0).contains(&random.unit())));
        let mut items = [0, 1, 2, 3, 4];
        random.shuffle(&mut items);
        items.sort_unstable();
        assert_eq!(items, [0, 1, 2, 3, 4]);
    }
}
