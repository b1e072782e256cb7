//! The clock of a GPU's multiprocessors. It falls under load, when the power limit is reached, so numbers that are
//! compared must have been taken at the same one.

use std::process::Command;

/// How far the clock may move between the first and the last round of what is judged; `STEADY` of extra.py is the same.
const STEADY: f64 = 0.02;

/// What nvidia-smi reports of the clock, in MHz; nothing where there is none, or it does not know.
pub(crate) fn now(device: u32) -> Option<f64> {
    // The tool counts GPUs in another order than the driver.
    let gpu = outcore_cuda::cuda_devices().ok()?.into_iter().nth(device as usize)?;
    let mut asked = Command::new("nvidia-smi");
    asked.args(["--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-i", &gpu.pci]);
    let answer = asked.output().ok().filter(|answer| answer.status.success())?;
    read(&String::from_utf8_lossy(&answer.stdout))
}

fn read(text: &str) -> Option<f64> {
    text.lines().next()?.trim().parse().ok().filter(|mhz: &f64| mhz.is_finite() && *mhz > 0.0)
}

/// Why numbers between two readings are not judged: the clock moved. Where there are not two readings, it is taken to
/// have been steady.
pub(crate) fn moved(clocks: &[f64]) -> Option<String> {
    let (first, last) = (clocks.first()?, clocks.last()?);
    let by = (last / first - 1.0).abs();
    (by > STEADY).then(|| format!("the clock moved from {first} to {last} MHz, by more than {:.0} %", STEADY * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_read_and_its_moves_are_judged() {
        assert_eq!(read("1980\n"), Some(1980.0));
        for wrong in ["", "[N/A]\n", "0\n", "NaN\n", "no devices were found"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
        assert_eq!(moved(&[]), None);
        assert_eq!(moved(&[1980.0, 1500.0, 1965.0]), None);
        assert!(moved(&[1980.0, 1900.0]).is_some_and(|why| why.contains("1980 to 1900 MHz")));
    }
}
