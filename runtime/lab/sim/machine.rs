//! Descriptions of machines: sizes and speeds of their memory, links, disk and compute.
//!
//! A machine is a JSON object. Every field is required, except those that "may be left out"; `link` may be `null`.
//! Unknown fields are refused.
//!
//! | field | unit |
//! |---|---|
//! | `name` | text |
//! | `devices` | devices of this kind; they share the disk and the host memory |
//! | `device_memory` | bytes of each |
//! | `host_memory` | bytes of all |
//! | `unified_memory` | may be left out: whether both are the same memory; each then names all of it |
//! | `link.bytes_per_second`, `link.latency_us`, `link.duplex` | of each device, in each direction |
//! | `disk.read_bytes_per_second`, `disk.write_bytes_per_second`, `disk.latency_us`, `disk.depth` | of the one disk |
//! | `compute.bytes_per_second` | bytes of weights that each device computes on |
//! | `compute.flops_per_second` | may be left out: floating-point operations that each device does at most |
//! | `compute.step_us` | time of each step besides its bytes |
//! | `jitter` | how far each time may be off, as a share of it: 0 to 0.9 |

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::device::LinkModel;
use crate::error::{Error, ErrorKind, Result, closest};
use crate::ids::Bytes;
use crate::store::QueueDepth;

/// The largest file of a machine, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A disk. An operation takes its latency, and then occupies the disk for as long as its bytes take. The latencies of
/// several operations overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskModel {
    /// Bytes per second read.
    pub read: Bytes,
    /// Bytes per second written.
    pub write: Bytes,
    /// Time from the start of an operation to its first byte.
    pub latency: Duration,
    /// The most operations that one runtime gives the disk at once.
    pub depth: QueueDepth,
}

/// The speed of a device's compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeModel {
    /// Bytes of weights per second. For a decode pass, which reads each weight once, this is the memory's bandwidth.
    pub bandwidth: Bytes,
    /// The most floating-point operations per second, if known: multiplications and additions of dense matrices of
    /// 16-bit floats, summed in 32 bits. Only `outcore_lab::planning` uses it: the bandwidth bounds a decode pass of
    /// one sequence.
    pub flops: Option<u64>,
    /// Time that every step takes besides its bytes.
    pub step: Duration,
}

impl ComputeModel {
    /// Returns the least seconds in which `bytes` are read and `flops` operations are done: the longer of the two,
    /// which overlap (Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model for
    /// multicore architectures"). `None` if there are operations and their rate is not known.
    ///
    /// ```
    /// use outcore_lab::sim::MachineModel;
    ///
    /// let compute = MachineModel::named("h200")?.compute;
    /// assert_eq!(compute.roofline_s(4.8e12, 0.0), Some(1.0));
    /// assert_eq!(compute.roofline_s(4.8e12, 2.0 * 989e12), Some(2.0));
    /// # Ok::<(), outcore::Error>(())
    /// ```
    pub fn roofline_s(&self, bytes: f64, flops: f64) -> Option<f64> {
        let reading = bytes / self.bandwidth.get().max(1) as f64;
        match self.flops {
            Some(peak) => Some(reading.max(flops / peak.max(1) as f64)),
            None if flops > 0.0 => None,
            None => Some(reading),
        }
    }
}

/// A machine to simulate.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineModel {
    /// Its name.
    pub name: String,
    /// The number of devices, each with its own pager. They share the disk and the host memory.
    pub devices: NonZeroU32,
    /// Bytes of each device's memory.
    pub device_memory: Bytes,
    /// Bytes of the host's memory.
    pub host_memory: Bytes,
    /// Whether host and device memory are the same memory. Both fields then name all of it, and both budgets come out
    /// of the same bytes.
    pub unified_memory: bool,
    /// The link between host memory and each device. `None` if device memory is host memory, and the disk reads right
    /// into it.
    pub link: Option<LinkModel>,
    /// The disk.
    pub disk: DiskModel,
    /// Each device's compute.
    pub compute: ComputeModel,
    /// How far each time may be off, as a share of it. The error is drawn evenly from minus to plus this.
    pub jitter: f64,
}

const NAMED: [(&str, &str); 6] = [
    ("h200", include_str!("machines/h200.json")),
    ("rtx4090", include_str!("machines/rtx4090.json")),
    ("gh200", include_str!("machines/gh200.json")),
    ("dgx-spark", include_str!("machines/dgx-spark.json")),
    ("laptop", include_str!("machines/laptop.json")),
    ("dgx-h200", include_str!("machines/dgx-h200.json")),
];

impl MachineModel {
    /// Returns the names of the known machines. `docs/simulator.md` says where their figures come from.
    pub fn names() -> impl Iterator<Item = &'static str> {
        NAMED.iter().map(|(name, _)| *name)
    }

    /// Returns the machine of a name.
    ///
    /// ```
    /// use outcore_lab::sim::MachineModel;
    ///
    /// let node = MachineModel::named("dgx-h200")?;
    /// assert_eq!(node.devices.get(), 8);
    /// # Ok::<(), outcore::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none. The message lists the names and the closest one.
    pub fn named(name: &str) -> Result<Self> {
        if let Some((_, text)) = NAMED.iter().find(|(known, _)| *known == name) {
            return Self::from_json(text).map_err(|error| error.context(format!("machine {name}")));
        }
        let names: Vec<&str> = Self::names().collect();
        let near = closest(name, names.iter().copied()).unwrap_or_default();
        Err(Error::new(ErrorKind::NotFound, format!("machine {name:?} is not known")).remedy(format!(
            "choose {}, or name a file that describes one; the closest name is {near}",
            names.join(", ")
        )))
    }

    /// Returns the machine of a name, or the one described in a file.
    ///
    /// # Errors
    /// As for [`named`](Self::named) if there is neither such a machine nor such a file; as for [`open`](Self::open).
    pub fn find(name_or_file: &str) -> Result<Self> {
        let is_path = name_or_file.contains('/') || name_or_file.ends_with(".json");
        if Self::names().any(|name| name == name_or_file) || !(is_path || Path::new(name_or_file).is_file()) {
            return Self::named(name_or_file);
        }
        Self::open(name_or_file)
    }

    /// Reads a machine from a file.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::PermissionDenied`] and [`ErrorKind::Io`] if it cannot be read; as for
    /// [`from_json`](Self::from_json).
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let shown = format!("machine file {}", path.display());
        let unreadable =
            |cause| Error::io(format!("read {shown}"), cause).remedy("check the path, and that it may be read");
        let file = File::open(path).map_err(unreadable)?;
        let mut text = Vec::new();
        file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(unreadable)?;
        if text.len() as u64 > FILE_BYTES_MAX {
            let message = format!("{shown} has more than {}", Bytes::new(FILE_BYTES_MAX));
            return Err(Error::new(ErrorKind::Format, message).remedy("give a JSON object of the fields of a machine"));
        }
        let text = std::str::from_utf8(&text)
            .map_err(|cause| Error::new(ErrorKind::Format, format!("{shown} is not text")).caused_by(cause))
            .map_err(|error| error.remedy("give a JSON object of the fields of a machine"))?;
        Self::from_json(text).map_err(|error| error.context(shown))
    }

    /// Reads a machine from a JSON text.
    ///
    /// # Errors
    /// [`ErrorKind::Format`] if the text is no JSON object; if a field is missing, unknown, there twice, or of the
    /// wrong kind; if a number is outside its range. The message names the field.
    pub fn from_json(text: &str) -> Result<Self> {
        let Distinct(value) = serde_json::from_str(text).map_err(|cause: serde_json::Error| {
            let what = if cause.is_data() { "a field is there twice" } else { "it is not JSON" };
            Error::new(ErrorKind::Format, what).caused_by(cause).remedy("give a JSON object of the fields of a machine")
        })?;
        let fields = Fields::of(&value, "")?;
        fields.known(&[
            "name",
            "devices",
            "device_memory",
            "host_memory",
            "unified_memory",
            "link",
            "disk",
            "compute",
            "jitter",
        ])?;
        let link = match fields.get("link")? {
            Value::Null => None,
            link => {
                let link = Fields::of(link, "link.")?;
                link.known(&["bytes_per_second", "latency_us", "duplex"])?;
                let bandwidth = link.bytes("bytes_per_second", 1)?;
                Some(LinkModel::new(bandwidth, link.microseconds("latency_us")?, link.truth("duplex")?)?)
            }
        };
        let disk = Fields::of(fields.get("disk")?, "disk.")?;
        disk.known(&["read_bytes_per_second", "write_bytes_per_second", "latency_us", "depth"])?;
        let compute = Fields::of(fields.get("compute")?, "compute.")?;
        compute.known(&["bytes_per_second", "flops_per_second", "step_us"])?;
        let flops = match compute.has("flops_per_second") {
            true => Some(compute.bytes("flops_per_second", 1)?.get()),
            false => None,
        };
        let depth = QueueDepth::new(disk.count("depth", 1024)?)?;
        let devices = fields.count("devices", 1024)?;
        Ok(Self {
            name: fields.text("name")?.to_owned(),
            devices: NonZeroU32::new(devices).unwrap_or(NonZeroU32::MIN),
            device_memory: fields.bytes("device_memory", 1)?,
            host_memory: fields.bytes("host_memory", 0)?,
            unified_memory: fields.has("unified_memory") && fields.truth("unified_memory")?,
            link,
            disk: DiskModel {
                read: disk.bytes("read_bytes_per_second", 1)?,
                write: disk.bytes("write_bytes_per_second", 1)?,
                latency: disk.microseconds("latency_us")?,
                depth,
            },
            compute: ComputeModel {
                bandwidth: compute.bytes("bytes_per_second", 1)?,
                flops,
                step: compute.microseconds("step_us")?,
            },
            jitter: fields.number("jitter", 0.0, 0.9)?,
        })
    }
}

/// A JSON value in whose objects no field is there twice.
struct Distinct(Value);

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Distinct;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_unit<E>(self) -> Result<Distinct, E> {
                Ok(Distinct(Value::Null))
            }

            fn visit_bool<E>(self, truth: bool) -> Result<Distinct, E> {
                Ok(Distinct(truth.into()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Distinct, E> {
                Ok(Distinct(number.into()))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Distinct, E> {
                Ok(Distinct(number.into()))
            }

            fn visit_f64<E>(self, number: f64) -> Result<Distinct, E> {
                Ok(Distinct(number.into()))
            }

            fn visit_str<E>(self, text: &str) -> Result<Distinct, E> {
                Ok(Distinct(text.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Distinct, A::Error> {
                let mut all = Vec::new();
                while let Some(Distinct(value)) = list.next_element()? {
                    all.push(value);
                }
                Ok(Distinct(all.into()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Distinct, A::Error> {
                let mut map = Map::new();
                while let Some((name, Distinct(value))) = fields.next_entry::<String, Distinct>()? {
                    if map.contains_key(&name) {
                        return Err(de::Error::custom(format_args!("{name:?}")));
                    }
                    map.insert(name, value);
                }
                Ok(Distinct(map.into()))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// An object's fields, and the prefix of their names in messages.
struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: &'static str,
}

impl<'a> Fields<'a> {
    fn of(value: &'a Value, prefix: &'static str) -> Result<Self> {
        let name = if prefix.is_empty() { "the machine" } else { prefix.trim_end_matches('.') };
        match value {
            Value::Object(map) => Ok(Self { map, prefix }),
            _ => Err(Error::new(ErrorKind::Format, format!("{name} is {value}, not an object"))
                .remedy("write it as {\"field\": value, ...}")),
        }
    }

    fn wrong(&self, name: &str, what: &str, remedy: String) -> Error {
        Error::new(ErrorKind::Format, format!("field {}{name} {what}", self.prefix)).remedy(remedy)
    }

    fn known(&self, names: &[&str]) -> Result<()> {
        match self.map.keys().find(|key| !names.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                let near = closest(key, names.iter().copied()).unwrap_or_default();
                Err(self.wrong(key, "does not exist", format!("the closest is {}{near}", self.prefix)))
            }
        }
    }

    fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    fn get(&self, name: &str) -> Result<&'a Value> {
        self.map.get(name).ok_or_else(|| self.wrong(name, "is missing", "every field is needed".to_owned()))
    }

    fn number(&self, name: &str, least: f64, most: f64) -> Result<f64> {
        let value = self.get(name)?;
        let range = || format!("give a number from {least} to {most}");
        let Some(number) = value.as_f64() else {
            return Err(self.wrong(name, &format!("is {value}, not a number"), range()));
        };
        // NaN is in no range.
        if (least..=most).contains(&number) {
            return Ok(number);
        }
        Err(self.wrong(name, &format!("is {value}"), range()))
    }

    fn bytes(&self, name: &str, least: u64) -> Result<Bytes> {
        // Numbers up to 2^60 can be summed without overflow.
        let most = (1u64 << 60) as f64;
        self.number(name, least as f64, most).map(|number| Bytes::new(number as u64))
    }

    fn microseconds(&self, name: &str) -> Result<Duration> {
        self.number(name, 0.0, 1e9).map(|number| Duration::from_nanos((number * 1e3).round() as u64))
    }

    fn count(&self, name: &str, most: u32) -> Result<u32> {
        let number = self.number(name, 1.0, f64::from(most))?;
        if number.fract() == 0.0 {
            return Ok(number as u32);
        }
        Err(self.wrong(name, &format!("is {number}"), format!("give a whole number from 1 to {most}")))
    }

    fn truth(&self, name: &str) -> Result<bool> {
        let value = self.get(name)?;
        let wrong = || self.wrong(name, &format!("is {value}"), "give true or false".to_owned());
        value.as_bool().ok_or_else(wrong)
    }

    fn text(&self, name: &str) -> Result<&'a str> {
        let value = self.get(name)?;
        let wrong = || self.wrong(name, &format!("is {value}"), "give a text".to_owned());
        value.as_str().ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn laptop() -> Value {
        serde_json::from_str(NAMED.iter().find(|(name, _)| *name == "laptop").unwrap().1).unwrap()
    }

    #[test]
    fn every_named_machine_reads() {
        for name in MachineModel::names() {
            let machine = MachineModel::find(name).unwrap();
            assert_eq!(machine.name, name);
            assert!(machine.device_memory >= Bytes::gib(8), "{name}");
            assert!(machine.compute.flops.is_some(), "{name}");
        }
    }

    #[test]
    fn an_unknown_machine_is_refused_with_the_names_and_the_closest() {
        let error = MachineModel::find("h20").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let text = error.to_string();
        for name in MachineModel::names() {
            assert!(text.contains(name), "{text}");
        }
        assert!(text.contains("the closest name is h200"), "{text}");
    }

    #[test]
    fn every_field_that_is_missing_negative_or_no_number_is_named() {
        let mut fields = Vec::new();
        for (name, value) in laptop().as_object().unwrap() {
            fields.push((name.clone(), None));
            if let Some(inner) = value.as_object() {
                fields.extend(inner.keys().map(|key| (name.clone(), Some(key.clone()))));
            }
        }
        assert!(fields.len() > 12, "{fields:?}");
        let edit = |(outer, inner): &(String, Option<String>), value: Option<Value>| {
            let mut machine = laptop();
            let (map, key) = match inner {
                None => (machine.as_object_mut().unwrap(), outer),
                Some(key) => (machine[outer].as_object_mut().unwrap(), key),
            };
            match value {
                Some(value) => drop(map.insert(key.clone(), value)),
                None => drop(map.remove(key)),
            }
            MachineModel::from_json(&machine.to_string()).unwrap_err()
        };
        for field in &fields {
            let name = field.1.as_ref().map_or(field.0.clone(), |key| format!("{}.{key}", field.0));
            let refused = |value: Option<Value>, what: &str| {
                let error = edit(field, value);
                let text = error.to_string();
                assert_eq!(error.kind(), ErrorKind::Format, "{text}");
                assert!(text.contains(&name) && text.contains(what), "{name}: {text}");
            };
            if !["unified_memory", "compute.flops_per_second"].contains(&name.as_str()) {
                refused(None, "is missing");
            }
            refused(Some(Value::from(-1)), "is -1");
            refused(Some(Value::from(vec![1])), "is [1]");
        }
        let mut machine = laptop();
        machine["disk"]["latency"] = Value::from(1);
        let text = MachineModel::from_json(&machine.to_string()).unwrap_err().to_string();
        assert!(text.contains("disk.latency does not exist") && text.contains("disk.latency_us"), "{text}");
        for text in ["", "[]", "7", "{\"name\": 1e999}"] {
            assert_eq!(MachineModel::from_json(text).unwrap_err().kind(), ErrorKind::Format, "{text}");
        }
    }

    #[test]
    fn what_may_be_left_out_may() {
        let mut machine = laptop();
        machine["compute"].as_object_mut().unwrap().remove("flops_per_second");
        machine.as_object_mut().unwrap().remove("unified_memory");
        let found = MachineModel::from_json(&machine.to_string()).unwrap();
        assert_eq!((found.compute.flops, found.unified_memory), (None, false));
        assert_eq!(found.compute.roofline_s(89.6e9, 0.0), Some(1.0));
        assert_eq!(found.compute.roofline_s(89.6e9, 1.0), None, "how long an operation takes is not known");
    }

    #[test]
    fn a_link_is_read_as_it_is_written() {
        let mut machine = laptop();
        machine["link"] = serde_json::json!({ "bytes_per_second": 25e9, "latency_us": 2.5, "duplex": false });
        let link = MachineModel::from_json(&machine.to_string()).unwrap().link.unwrap();
        assert_eq!((link.bandwidth().get(), link.latency().as_nanos(), link.duplex()), (25_000_000_000, 2500, false));
        machine["link"]["duplex"] = Value::from("no");
        let text = MachineModel::from_json(&machine.to_string()).unwrap_err().to_string();
        assert!(text.contains("link.duplex is \"no\""), "{text}");
    }
}
