use outcore::{Bytes, DType, Plan, PolicyKind, Runtime};

fn main() -> outcore::Result<()> {
    let rt = Runtime::builder().device_budget(Bytes::mib(32)).policy(PolicyKind::Plan).open()?;
    let model = rt.open_model("model.gguf")?; // headers only; larger than 32 MiB is fine
    let order = [model.tensor("blk.0.attn_q.weight")?];
    rt.plan(Plan::Cycle(&order)); // used in this order, again and again: read ahead, and evicted by it
    println!("{} bytes", rt.pin(&order[0]).wait()?.len()); // or `.await`; while the guard lives, the bytes stay
    let t = rt.alloc(DType::F32, &[1 << 20])?; // read-write, zero-filled, paged to a scratch file
    rt.pin(&t).write().wait()?.view_mut::<f32>()?.fill(1.0);
    rt.close()
}
