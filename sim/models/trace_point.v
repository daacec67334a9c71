// Beside a stream: its handshake in every cycle, told to C++. See sim/trace.py.

import "DPI-C" function void trace_point(input int point, input bit valid, input bit ready, input int value);

module trace_point #(parameter POINT = 0) (input clk, input valid, input ready, input [31:0] value);
    always @(posedge clk) trace_point(POINT, valid, ready, value);
endmodule
