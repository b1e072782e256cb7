//! Functions of each number of a vector: exponentials, and the activations made of them.
//!
//! They are written once, without fused additions, and compiled for each [`Level`]: all levels give the same bits.

use super::Level;

/// From here on, `e^x` is more than an `f32` holds.
const HIGHEST: f32 = 88.722_84;
/// Below this, `e^x` is less than the smallest normal `f32`; it is taken for zero.
const LOWEST: f32 = -87.336_54;
/// Adding and subtracting 1.5 * 2^23 rounds to nearest even, and vectorises where `round` does not.
const ROUNDER: f32 = 12_582_912.0;

/// `e^x` within two units of the last place. NaN stays NaN.
///
/// With `n = round(x / ln 2)`, `e^x = 2^n * e^r`, where `|r| <= ln 2 / 2` and `ln 2` is subtracted in two parts (Cody
/// and Waite, "Software manual for the elementary functions", 1980). The polynomial is the one of Cephes' `expf`.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let within = x.clamp(LOWEST, HIGHEST);
    let rounded = within * std::f32::consts::LOG2_E + ROUNDER;
    let n = rounded - ROUNDER;
    let r = within - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p * r + c;
    }
    let e = p * (r * r) + r + 1.0;
    // The last bits of `rounded` are `n`: a conversion would not vectorise. In two steps, as 2^128 is not an `f32`.
    let n = rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let e = e * power(n >> 1) * power(n.wrapping_sub(n >> 1));
    let e = if x > HIGHEST { f32::INFINITY } else { e };
    if x < LOWEST { 0.0 } else { e }
}

#[inline(always)]
fn silu_plainly(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(g, u)| *g = *g / (1.0 + exp(-*g)) * u);
}

#[inline(always)]
fn gelu_plainly(gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(g, u)| {
        let inner = 0.797_884_6 * (*g + 0.044_715 * *g * *g * *g);
        // `(1 + tanh(x)) / 2` is the sigmoid of `2 x`.
        *g = *g / (1.0 + exp(-2.0 * inner)) * u;
    });
}

#[inline(always)]
fn clamped_silu_plainly((limit, alpha): (f32, f32), gate: &mut [f32], up: &[f32]) {
    gate.iter_mut().zip(up).for_each(|(g, u)| {
        let (gate, up) = (g.min(limit), u.clamp(-limit, limit));
        *g = gate / (1.0 + exp(-alpha * gate)) * (up + 1.0);
    });
}

#[inline(always)]
fn exp_less_plainly(x: &mut [f32], peak: f32) {
    x.iter_mut().for_each(|x| *x = exp(*x - peak));
}

/// A function for all levels, of the one that is compiled for each.
macro_rules! by_level {
    ($(#[$doc:meta])* $name:ident, $plain:ident, $($arg:ident: $type:ty),*) => {
        $(#[$doc])*
        pub fn $name(level: Level, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) {
                    $plain($($arg),*);
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $type),*) {
                    $plain($($arg),*);
                }
                // SAFETY: `clamped` returns a level only after its features were detected.
                unsafe {
                    match level.clamped() {
                        Level::Avx512 => return avx512($($arg),*),
                        Level::Avx2 => return avx2($($arg),*),
                        Level::Scalar => {}
                    }
                }
            }
            let _ = level;
            $plain($($arg),*);
        }
    };
}

by_level!(
    /// `silu(gate) * up` in place of `gate` (Shazeer, "GLU variants improve transformer", 2020).
    silu, silu_plainly, gate: &mut [f32], up: &[f32]
);
by_level!(
    /// `gelu(gate) * up` in place of `gate`, where GELU has its approximation by a hyperbolic tangent (Hendrycks and
    /// Gimpel, "Gaussian error linear units", 2016).
    gelu, gelu_plainly, gate: &mut [f32], up: &[f32]
);
by_level!(
    /// `g * sigmoid(alpha * g) * (u + 1)` in place of `gate`, of `g = min(gate, limit)` and `u = up` within `limit` of
    /// zero, where `bounds` is `(limit, alpha)`.
    clamped_silu, clamped_silu_plainly, bounds: (f32, f32), gate: &mut [f32], up: &[f32]
);
by_level!(
    /// `e^(x - peak)` in place of each `x`.
    exp_less, exp_less_plainly, x: &mut [f32], peak: f32
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exponential_is_right_within_two_units_of_the_last_place() {
        let sweep = (-8_733..=8_872).flat_map(|x: i32| [0.0, 0.003_7, -0.004_9].map(|d| x as f32 / 100.0 + d));
        for x in sweep.filter(|x| (LOWEST..=HIGHEST).contains(x)) {
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 2.4e-7, "e^{x}: {got} and {want}");
        }
        assert_eq!([exp(0.0), exp(-0.0), exp(f32::NEG_INFINITY), exp(-1e30)], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!([exp(f32::INFINITY), exp(89.0)], [f32::INFINITY; 2]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn all_levels_give_the_same_bits_of_the_activations_that_are_defined() {
        let gates: Vec<f32> = (-400..400).map(|x| x as f32 / 8.0).chain([f32::NAN, 1e30, -1e30]).collect();
        let ups: Vec<f32> = (0..gates.len()).map(|x| (x as f32 * 0.7).sin() * 9.0).collect();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        type Function = fn(Level, &mut [f32], &[f32]);
        type Defined = fn(f64, f64) -> f64;
        let functions: [(Function, Defined); 4] = [
            (silu, |g, u| g / (1.0 + (-g).exp()) * u),
            (gelu, |g, u| {
                0.5 * g * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g * g * g)).tanh()) * u
            }),
            (
                |level, gate, up| clamped_silu(level, (7.0, 1.702), gate, up),
                |g, u| g.min(7.0) / (1.0 + (-1.702 * g.min(7.0)).exp()) * (u.clamp(-7.0, 7.0) + 1.0),
            ),
            (|level, gate, _| exp_less(level, gate, 50.0), |g, _| (g - 50.0).exp()),
        ];
        for (nth, (function, defined)) in functions.into_iter().enumerate() {
            let mut plain = gates.clone();
            function(Level::Scalar, &mut plain, &ups);
            for ((got, g), u) in plain.iter().zip(&gates).zip(&ups).take(800) {
                let want = defined(f64::from(*g), f64::from(*u));
                assert!((f64::from(*got) - want).abs() <= 1e-6 * (1.0 + want.abs()), "{nth} of {g}: {got} and {want}");
            }
            // NaN in the gate stays NaN, but where it is clamped.
            assert_eq!(plain[800].is_nan(), nth != 2, "{nth}");
            for level in [Level::Avx2, Level::Avx512] {
                let mut x = gates.clone();
                function(level, &mut x, &ups);
                assert_eq!(bits(&x[..800]), bits(&plain[..800]), "{nth} at {level:?}");
            }
        }
    }
}
