"""What every gRPC process shares: status details, interceptors, server and channel options."""
