//! libCacheSim's `oracleGeneral`: records of 24 bytes, little-endian and without gaps: the time in seconds (u32), the
//! object's id (u64), its size in bytes (u32), and the index of its next use (i64), which is found anew here. All uses
//! read.
//!
//! The form: libCacheSim, `doc/quickstart_traces.md`.

use std::io::BufRead;

use super::forms::failed;
use super::{Progress, TraceWriter, input, tell};
use crate::error::{Error, ErrorKind, Result};

const RECORD: usize = 24;

pub(super) fn read(mut bytes: impl BufRead, name: &str, progress: Progress<'_>) -> Result<TraceWriter> {
    let mut writer = TraceWriter::new(["object"]);
    let mut record = Vec::with_capacity(RECORD);
    loop {
        let len = input::record(&mut bytes, RECORD, &mut record).map_err(|cause| failed(name, cause))?;
        if len == 0 {
            return Ok(writer);
        }
        if len < RECORD {
            let what = format!("the trace {name} ends with {len} bytes, where a use has {RECORD}");
            let remedy = "fetch the file again, or name its form if it is not oracle-general";
            return Err(Error::new(ErrorKind::Format, what).remedy(remedy));
        }
        let mut id = [0; 8];
        id.copy_from_slice(&record[4..12]);
        tell(progress, writer.uses());
        writer.used(u64::from_le_bytes(id), || 0)?;
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::trace::pages_of;
    use crate::sim::{Trace, TraceForm, TraceOptions};

    fn records(ids: &[u64]) -> Vec<u8> {
        let record = |id: &u64| [&7u32.to_le_bytes()[..], &id.to_le_bytes(), &[0; 4], &(-1i64).to_le_bytes()].concat();
        ids.iter().flat_map(record).collect()
    }

    #[test]
    fn records_are_read() {
        let (bytes, mut none) = (records(&[u64::MAX, 5, u64::MAX, 0]), |_| ());
        for (name, form) in [("w01.oracleGeneral.bin", None), ("renamed", Some(TraceForm::OracleGeneral))] {
            let options = TraceOptions { form, ..TraceOptions::default() };
            let mut trace = Trace::read(&bytes[..], name, &options, &mut none).unwrap();
            assert_eq!((pages_of(&mut trace), trace.writes()), (vec![0, 1, 0, 2], 0));
        }
        let error = super::read(&bytes[..50], "cut", &mut none).unwrap_err();
        assert!(error.to_string().contains("ends with 2 bytes"), "{error}");
    }
}
