//! The shim alone, for tests and for trying it by hand: `decapod-shim container <shim.json>`.

fn main() {
    if decapod_runtime::shim::is_shim_invocation() {
        decapod_runtime::shim::shim_main();
    }
    eprintln!("this program is started by the runtime's tests");
    std::process::exit(1);
}
