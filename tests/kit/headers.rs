//! A small writer of model files, so that tests can say exactly which byte is wrong.

/// Appends a GGUF string: length, then bytes.
pub fn put_str(out: &mut Vec<u8>, s: impl AsRef<[u8]>) {
    out.extend((s.as_ref().len() as u64).to_le_bytes());
    out.extend(s.as_ref());
}

/// A GGUF value with its type number in front.
#[derive(Clone, Debug, PartialEq)]
pub enum Kv {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(u8),
    Str(Vec<u8>),
    U64(u64),
    I64(i64),
    F64(f64),
    /// Element type and elements.
    Array(u32, Vec<Kv>),
    /// A type number and whatever bytes follow it.
    Raw(u32, Vec<u8>),
}

impl Kv {
    pub fn str(s: &str) -> Self {
        Self::Str(s.as_bytes().to_vec())
    }

    pub fn strs<'a>(items: impl IntoIterator<Item = &'a str>) -> Self {
        Self::Array(8, items.into_iter().map(Self::str).collect())
    }

    pub fn id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Str(_) => 8,
            Self::Array(..) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
            Self::Raw(id, _) => *id,
        }
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(n) => out.extend(n.to_le_bytes()),
            Self::I8(n) => out.extend(n.to_le_bytes()),
            Self::U16(n) => out.extend(n.to_le_bytes()),
            Self::I16(n) => out.extend(n.to_le_bytes()),
            Self::U32(n) => out.extend(n.to_le_bytes()),
            Self::I32(n) => out.extend(n.to_le_bytes()),
            Self::F32(n) => out.extend(n.to_le_bytes()),
            Self::Bool(n) => out.push(*n),
            Self::Str(s) => put_str(out, s),
            Self::U64(n) => out.extend(n.to_le_bytes()),
            Self::I64(n) => out.extend(n.to_le_bytes()),
            Self::F64(n) => out.extend(n.to_le_bytes()),
            Self::Array(element, items) => {
                out.extend(element.to_le_bytes());
                out.extend((items.len() as u64).to_le_bytes());
                items.iter().for_each(|item| item.put(out));
            }
            Self::Raw(_, bytes) => out.extend(bytes),
        }
    }
}

/// A tensor info as a GGUF file has it: innermost extent first, offset from the start of the data.
#[derive(Clone, Debug, PartialEq)]
pub struct Info {
    pub name: Vec<u8>,
    pub dims: Vec<u64>,
    pub ggml: u32,
    pub offset: u64,
}

/// A GGUF file in parts; every field can be made to lie.
#[derive(Clone, Debug)]
pub struct GgufFile {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub kv_count: Option<u64>,
    pub kvs: Vec<(Vec<u8>, Kv)>,
    pub tensors: Vec<Info>,
    pub alignment: u64,
    pub data_len: u64,
}

impl Default for GgufFile {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            kv_count: None,
            kvs: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            data_len: 0,
        }
    }
}

impl GgufFile {
    pub fn kv(mut self, key: &str, value: Kv) -> Self {
        self.kvs.push((key.as_bytes().to_vec(), value));
        self
    }

    /// Adds a tensor at a given offset; the data is not made longer.
    pub fn info(mut self, name: &str, dims: &[u64], ggml: u32, offset: u64) -> Self {
        self.tensors.push(Info { name: name.as_bytes().to_vec(), dims: dims.to_vec(), ggml, offset });
        self
    }

    /// Adds a tensor of `len` bytes behind the others.
    pub fn tensor(self, name: &str, dims: &[u64], ggml: u32, len: u64) -> Self {
        let offset = self.data_len.next_multiple_of(self.alignment);
        let mut this = self.info(name, dims, ggml, offset);
        this.data_len = offset + len;
        this
    }

    pub fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.kv_count.unwrap_or(self.kvs.len() as u64).to_le_bytes());
        for (key, value) in &self.kvs {
            put_str(&mut out, key);
            out.extend(value.id().to_le_bytes());
            value.put(&mut out);
        }
        for t in &self.tensors {
            put_str(&mut out, &t.name);
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.ggml.to_le_bytes());
            out.extend(t.offset.to_le_bytes());
        }
        out
    }

    /// The whole file; data bytes are zero.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        out.resize(out.len() + self.data_len as usize, 0);
        out
    }
}

/// A safetensors file: length, header, zero data.
pub fn safetensors(json: &str, data_len: usize) -> Vec<u8> {
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend(json.as_bytes());
    out.resize(out.len() + data_len, 0);
    out
}

/// A valid GGUF file with every value type, tied tensors, and several element types.
pub fn rich_gguf() -> GgufFile {
    GgufFile::default()
        .kv("general.architecture", Kv::str("llama"))
        .kv("general.alignment", Kv::U32(32))
        .kv("a.u8", Kv::U8(200))
        .kv("a.i8", Kv::I8(-3))
        .kv("a.u16", Kv::U16(60_000))
        .kv("a.i16", Kv::I16(-30_000))
        .kv("a.i32", Kv::I32(-7))
        .kv("a.f32", Kv::F32(0.5))
        .kv("a.bool", Kv::Bool(1))
        .kv("a.u64", Kv::U64(u64::MAX))
        .kv("a.i64", Kv::I64(i64::MIN))
        .kv("a.f64", Kv::F64(1e300))
        .kv("tokenizer.ggml.tokens", Kv::strs(["<s>", "", "\u{120}the", "\u{1f600}"]))
        .kv("tokenizer.ggml.scores", Kv::Array(6, vec![Kv::F32(1.0), Kv::F32(-2.0)]))
        .kv("flags", Kv::Array(7, vec![Kv::Bool(0), Kv::Bool(1)]))
        .kv("nested", Kv::Array(9, vec![Kv::Array(4, vec![Kv::U32(1), Kv::U32(2)]), Kv::Array(8, vec![Kv::str("x")])]))
        .tensor("token_embd.weight", &[64, 10], 3, 400)
        .info("output.weight", &[64, 10], 3, 0)
        .tensor("norm.weight", &[64], 0, 256)
        .tensor("blk.0.ffn.weight", &[256, 2], 12, 288)
        .tensor("empty", &[0, 4], 0, 0)
        .tensor("scalar", &[], 0, 4)
}

/// A valid safetensors file.
pub fn rich_safetensors() -> Vec<u8> {
    safetensors(
        r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[16,28]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"none":{"dtype":"U8","shape":[0],"data_offsets":[28,28]},"f4":{"dtype":"F4","shape":[2,2],"data_offsets":[28,30]}}   "#,
        30,
    )
}

/// A valid index.
pub fn rich_index() -> Vec<u8> {
    br#"{"metadata":{"total_size":60},"weight_map":{"b":"m-00001-of-00002.safetensors","a":"m-00001-of-00002.safetensors","z":"m-00002-of-00002.safetensors"}}"#.to_vec()
}
