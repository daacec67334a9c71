// Beside a queue: the most that it ever held, and how often it was full, told to C++ when the simulation ends.
// See sim/queues.py.

import "DPI-C" context function void queue_mark(
    input string place, input int depth, input int most, input longint full, input longint refused
);

module queue_mark #(parameter DEPTH = 0) (input clk, input rst, input i_valid, input i_ready, input o_valid, input o_ready);
    int held = 0, most = 0;
    longint full = 0, refused = 0;
    wire push = i_valid & i_ready, pop = o_valid & o_ready;
    always @(posedge clk)
        if (rst) held <= 0;
        else begin
            held <= held + int'(push) - int'(pop);
            if (held > most) most <= held;
            if (held == DEPTH) full <= full + 1;
            if (i_valid & ~i_ready) refused <= refused + 1;
        end
    final queue_mark($sformatf("%m"), DEPTH, most, full, refused);
endmodule
