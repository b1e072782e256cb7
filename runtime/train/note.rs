//! What a durable folder remembers of an optimizer, beside its tensors.

use outcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::errors::invalid;
use crate::group::Group;
use crate::layout::Layout;

const FORMAT: &str = "outcore-train";
const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    format: String,
    version: u32,
    /// Steps that were made. After an odd number, the next one takes the blocks from the last to the first.
    pub step: u64,
    /// Whether a step has begun, and not ended: some parameters are of the next step.
    pub in_step: bool,
    groups: Vec<GroupNote>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct GroupNote {
    rule: String,
    states: Vec<String>,
    parameters: u64,
    elements: u64,
}

#[derive(Serialize, Deserialize)]
struct Whole {
    optimizer: Note,
    program: Value,
}

impl Note {
    /// That of an optimizer that has made no step.
    pub fn new(groups: &[Group], layout: &Layout) -> Self {
        let of_group = |(number, group): (usize, &Group)| {
            let parameters = layout.parameters.iter().filter(|parameter| parameter.group == number);
            GroupNote {
                rule: group.rule.name().into(),
                states: group.rule.states().iter().map(|state| (*state).to_owned()).collect(),
                parameters: group.parameters.len() as u64,
                elements: parameters.map(|parameter| parameter.elements).sum(),
            }
        };
        let groups = groups.iter().enumerate().map(of_group).collect();
        Self { format: FORMAT.into(), version: VERSION, step: 0, in_step: false, groups }
    }

    /// The note, and what the program said. `None` if there is nothing.
    pub fn read(bytes: &[u8]) -> Result<Option<(Self, Value)>> {
        if bytes.is_empty() {
            return Ok(None);
        }
        let format = |what: String| {
            Error::new(ErrorKind::Format, what).remedy("choose the folder of an optimizer, or an empty one")
        };
        // The version comes first: it may have changed anything else.
        let head: Value = serde_json::from_slice(bytes).map_err(|_| format("the folder's note is no JSON".into()))?;
        let optimizer = &head["optimizer"];
        if optimizer["format"] != FORMAT {
            return Err(format("the folder's note is not that of an optimizer".into()));
        }
        if optimizer["version"] != VERSION {
            let what = format!("the folder's optimizer has version {}, and this build reads 1", optimizer["version"]);
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("use the version of outcore that wrote it"));
        }
        let Whole { optimizer, program } =
            serde_json::from_value(head).map_err(|cause| format(format!("the folder's note is malformed: {cause}")))?;
        Ok(Some((optimizer, program)))
    }

    /// The bytes of the note, with what the program says.
    pub fn with(&self, program: &Value) -> Result<Vec<u8>> {
        serde_json::to_vec(&Whole { optimizer: self.clone(), program: program.clone() }).map_err(|cause| {
            Error::new(ErrorKind::Internal, format!("a note is not written: {cause}")).remedy("report this as a bug")
        })
    }

    /// Whether all parameters are of one step.
    pub fn is_between_steps(&self) -> Result<()> {
        if !self.in_step {
            return Ok(());
        }
        let what = "some parameters of the folder are of another step than the others";
        Err(invalid(what.into(), "go back to a commit (`Durable::rollback`), or open an older generation"))
    }

    /// Whether this is the note of such an optimizer.
    pub fn check(&self, wanted: &Self) -> Result<()> {
        if self.groups.len() != wanted.groups.len() {
            let what = format!("the folder has {} groups, and {} are given", self.groups.len(), wanted.groups.len());
            return Err(differs(what));
        }
        for (number, (has, wanted)) in self.groups.iter().zip(&wanted.groups).enumerate() {
            if has != wanted {
                let text = |group: &GroupNote| {
                    let GroupNote { rule, states, parameters, elements } = group;
                    format!("{rule} of {parameters} parameters with {elements} elements and the states {states:?}")
                };
                return Err(differs(format!("group {number} of the folder is {}, not {}", text(has), text(wanted))));
            }
        }
        Ok(())
    }
}

fn differs(what: String) -> Error {
    invalid(what, "give the groups that the folder was made for")
}
