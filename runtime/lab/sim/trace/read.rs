//! Traces from files: which form a file has, and how it is packed.

use std::io::BufRead;
use std::path::Path;

use super::forms::{OpColumn, TraceForm, TraceOptions, failed};
use super::input::{opened, start, started, unpacked};
use super::{Progress, Trace, captured, lis, mooncake, oracle, table};
use crate::error::{Error, ErrorKind, Result};
use crate::sim::capture;

impl Trace {
    /// Reads a trace's file. What it is packed by, and its [form](TraceForm) where `options` name none, follow from its
    /// first bytes; of `oracleGeneral` and `.lis`, which have no mark, also from the file's name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::PermissionDenied`] and [`ErrorKind::Io`] if the file cannot be read;
    /// [`ErrorKind::Format`] if it is not of its form, has a line longer than
    /// [`LINE_BYTES_MAX`](super::LINE_BYTES_MAX), or has no use; [`ErrorKind::InvalidArgument`] if a column is not
    /// there, or is needed; [`ErrorKind::Unsupported`] as for [`TraceWriter::used`](super::TraceWriter::used).
    pub fn open(path: impl AsRef<Path>, options: &TraceOptions, progress: Progress<'_>) -> Result<Self> {
        let (file, name) = opened(path.as_ref())?;
        Self::read(file, &name, options, progress)
    }

    /// As [`open`](Self::open), but reads from `input`. Messages call it `name`.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn read(input: impl BufRead, name: &str, options: &TraceOptions, progress: Progress<'_>) -> Result<Self> {
        let unpacked = unpacked(input).map_err(|cause| failed(name, cause))?;
        Self::unpacked(unpacked, name, options, progress)
    }

    fn unpacked(input: impl BufRead, name: &str, options: &TraceOptions, progress: Progress<'_>) -> Result<Self> {
        let input = started(input).map_err(|cause| failed(name, cause))?;
        if start(&input).is_empty() {
            let error = Error::new(ErrorKind::Format, format!("the trace {name} is empty"));
            return Err(error.remedy("give a file with at least one use"));
        }
        let form = match options.form {
            Some(form) => form,
            None => form_of(start(&input), name)?,
        };
        if form != TraceForm::Text && (options.column.is_some() || options.op_column != OpColumn::Usual) {
            let what = format!("the trace {name} has the form {form}, which has no columns");
            return Err(
                Error::new(ErrorKind::InvalidArgument, what).remedy("leave the column out, or name another form")
            );
        }
        match form {
            TraceForm::Capture if options.read_only => {
                let what = format!("the capture {name} says itself which uses write");
                Err(Error::new(ErrorKind::InvalidArgument, what).remedy("leave out that it only reads"))
            }
            TraceForm::Capture => captured::read(input, name, progress),
            TraceForm::Mooncake => mooncake::read(input, name, options.read_only, progress)?.end(),
            TraceForm::Text => table::read(input, name, options, progress)?.end(),
            TraceForm::OracleGeneral => oracle::read(input, name, progress)?.end(),
            TraceForm::Lis => lis::read(input, name, progress)?.end(),
        }
    }
}

/// The form that the first bytes tell, or the name.
fn form_of(start: &[u8], name: &str) -> Result<TraceForm> {
    // One byte is enough: no text begins with it, and what is cut off is then told as a capture that is incomplete.
    if start.first() == Some(&capture::MAGIC[0]) {
        return Ok(TraceForm::Capture);
    }
    let file = Path::new(name).file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    // Not oracleGeneralOpNS and the like, whose records are longer.
    let mut ends = file.match_indices("oraclegeneral").map(|(at, name)| &file[at + name.len()..]);
    if ends.any(|end| end.is_empty() || end.starts_with(['.', '_', '-']) || end.starts_with("bin"))
        && start.contains(&0)
    {
        return Ok(TraceForm::OracleGeneral);
    }
    if start.trim_ascii_start().first() == Some(&b'{') {
        return Ok(TraceForm::Mooncake);
    }
    if start.contains(&0) {
        let what = format!("the trace {name} is neither a capture nor a text");
        let forms = TraceForm::ALL.map(TraceForm::name).join(", ");
        return Err(Error::new(ErrorKind::Format, what).remedy(format!("name its form: {forms}")));
    }
    // Other texts have four numbers a line too, and mean something else by them.
    let name = [".gz", ".zst"].into_iter().find_map(|end| file.strip_suffix(end)).unwrap_or(&file);
    let mut lines = start.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty());
    if name.ends_with(".lis") && lines.next().is_some_and(|line| lis::numbers(line).is_some()) {
        return Ok(TraceForm::Lis);
    }
    Ok(TraceForm::Text)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::sim::trace::forms::Column;
    use crate::sim::trace::pages_of;

    fn read(file: &[u8], name: &str, options: &TraceOptions) -> Result<Trace> {
        Trace::read(file, name, options, &mut |_| ())
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    /// With a checksum, as the program `zstd` writes it.
    fn zstd(bytes: &[u8]) -> Vec<u8> {
        let mut out = ::zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
        out.include_checksum(true).unwrap();
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    #[test]
    fn every_form_may_be_packed() {
        let text: Vec<u8> = (0..30_000u32).flat_map(|n| format!("{}\n", n % 700).into_bytes()).collect();
        let requests = b"{\"hash_ids\": [9, 8, 9]}\n".to_vec();
        for (plain, uses, pages) in [(text, 30_000, 700), (requests, 3, 2)] {
            for packed in [plain.clone(), gzip(&plain), zstd(&plain), [gzip(&plain[..9]), gzip(&plain[9..])].concat()] {
                let trace = read(&packed, "made", &TraceOptions::default()).unwrap();
                assert_eq!((trace.uses(), trace.pages()), (uses, pages));
            }
        }
    }

    #[test]
    fn what_is_packed_wrongly_is_named() {
        let text: Vec<u8> = (0..30_000u32).flat_map(|n| format!("{n}\n").into_bytes()).collect();
        for packed in [gzip(&text), zstd(&text)] {
            let cut = &packed[..packed.len() / 2];
            let error = read(cut, "made.gz", &TraceOptions::default()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Format, "{error}");
            assert!(error.to_string().contains("made.gz"), "{error}");
            let mut damaged = packed.clone();
            let middle = damaged.len() / 2;
            damaged[middle..middle + 40].fill(0xFF);
            assert!(read(&damaged, "made.gz", &TraceOptions::default()).is_err());
        }
    }

    #[test]
    fn forms_are_told_apart_and_may_be_named() {
        let none = TraceOptions::default();
        let error = read(&[1, 0, 2, 3], "made.bin", &none).unwrap_err();
        assert!(error.to_string().contains("oracle-general"), "{error}");
        let as_text = TraceOptions { form: Some(TraceForm::Text), ..none.clone() };
        // A text whose ids look like JSON.
        let mut trace = read(b"{a}\n{b}\n{a}\n", "made.txt", &as_text).unwrap();
        assert_eq!(pages_of(&mut trace), [0, 1, 0]);
        assert!(read(b"{a}\n", "made.txt", &none).unwrap_err().to_string().contains("line 1"));
        let column = TraceOptions { column: Some(Column::Name("id".into())), ..none };
        let error = read(b"{\"hash_ids\": [1]}", "made.jsonl", &column).unwrap_err();
        assert!(error.to_string().contains("no columns"), "{error}");
        for form in TraceForm::ALL {
            assert_eq!(form.name().parse::<TraceForm>().unwrap(), form);
        }
        assert!("paper".parse::<TraceForm>().unwrap_err().to_string().contains("mooncake"));
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = Trace::open("no/such/trace.jsonl", &TraceOptions::default(), &mut |_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert!(error.to_string().contains("no/such/trace.jsonl"), "{error}");
    }
}
