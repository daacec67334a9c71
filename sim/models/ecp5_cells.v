// MIT License, the emufpga authors.
//
// Two ECP5 cells in the modes that hw/primitives uses, after the behaviour that Lattice's sysDSP and memory usage guides
// (FPGA-TN-02205, FPGA-TN-02204) give them. Our reading of it: no vendor model was at hand to compare with; the use of
// the memory's pins was checked against the mapping in yosys. A parameter or a pin setting outside these modes stops the
// simulation; a pin that is not declared here does not elaborate. Initial contents are modelled in the memory's mode of
// 18 bits, as yosys maps them; timing and read-during-write results are not modelled.

// 18 x 18 multiplier, each factor signed or unsigned, with input, pipeline and output registers: three cycles.
module MULT18X18D #(
    parameter REG_INPUTA_CLK = "NONE",
    parameter REG_INPUTB_CLK = "NONE",
    parameter REG_PIPELINE_CLK = "NONE",
    parameter REG_OUTPUT_CLK = "NONE",
    parameter GSR = "ENABLED"
) (
    input CLK0, CE0, RST0, SIGNEDA, SIGNEDB, SOURCEA, SOURCEB,
    input A0, A1, A2, A3, A4, A5, A6, A7, A8, A9, A10, A11, A12, A13, A14, A15, A16, A17,
    input B0, B1, B2, B3, B4, B5, B6, B7, B8, B9, B10, B11, B12, B13, B14, B15, B16, B17,
    output P0, P1, P2, P3, P4, P5, P6, P7, P8, P9, P10, P11, P12, P13, P14, P15, P16, P17,
    output P18, P19, P20, P21, P22, P23, P24, P25, P26, P27, P28, P29, P30, P31, P32, P33, P34, P35
);
    initial if (REG_INPUTA_CLK != "CLK0" || REG_INPUTB_CLK != "CLK0" || REG_PIPELINE_CLK != "CLK0"
                || REG_OUTPUT_CLK != "CLK0" || GSR != "DISABLED")
        $fatal(1, "MULT18X18D: only all registers on CLK0 without GSR are modelled");

    // A 19th bit makes an unsigned factor a signed one.
    reg signed [18:0] a, b;
    reg signed [37:0] pipeline;
    reg [35:0] p;
    always @(posedge CLK0) begin
        if (!CE0 || RST0 || SOURCEA || SOURCEB)
            $fatal(1, "MULT18X18D: enable, reset and shift inputs are modelled at rest only");
        a <= {SIGNEDA & A17, A17, A16, A15, A14, A13, A12, A11, A10, A9, A8, A7, A6, A5, A4, A3, A2, A1, A0};
        b <= {SIGNEDB & B17, B17, B16, B15, B14, B13, B12, B11, B10, B9, B8, B7, B6, B5, B4, B3, B2, B1, B0};
        pipeline <= a * b;
        p <= pipeline[35:0];
    end
    assign {P35, P34, P33, P32, P31, P30, P29, P28, P27, P26, P25, P24, P23, P22, P21, P20, P19, P18,
            P17, P16, P15, P14, P13, P12, P11, P10, P9, P8, P7, P6, P5, P4, P3, P2, P1, P0} = p;
endmodule

// Block memory, port A writes, port B reads through the output register: two cycles. In the modes of 1, 2, 4 and 9
// bits the address is of the bits, counted in steps of the mode's width without the ninth bits; in the mode of 18 bits
// the two lowest address pins of port A enable its bytes. Each INITVAL holds sixteen words of 18 bits, 20 bits apart.
module DP16KD #(
    parameter DATA_WIDTH_A = 18,
    parameter DATA_WIDTH_B = 18,
    parameter REGMODE_A = "NOREG",
    parameter REGMODE_B = "NOREG",
    parameter CSDECODE_A = "0b000",
    parameter CSDECODE_B = "0b000",
    parameter WRITEMODE_A = "NORMAL",
    parameter WRITEMODE_B = "NORMAL",
    parameter GSR = "ENABLED",
    parameter [319:0]
        INITVAL_00 = 0, INITVAL_01 = 0, INITVAL_02 = 0, INITVAL_03 = 0, INITVAL_04 = 0, INITVAL_05 = 0, INITVAL_06 = 0,
        INITVAL_07 = 0, INITVAL_08 = 0, INITVAL_09 = 0, INITVAL_0A = 0, INITVAL_0B = 0, INITVAL_0C = 0, INITVAL_0D = 0,
        INITVAL_0E = 0, INITVAL_0F = 0, INITVAL_10 = 0, INITVAL_11 = 0, INITVAL_12 = 0, INITVAL_13 = 0, INITVAL_14 = 0,
        INITVAL_15 = 0, INITVAL_16 = 0, INITVAL_17 = 0, INITVAL_18 = 0, INITVAL_19 = 0, INITVAL_1A = 0, INITVAL_1B = 0,
        INITVAL_1C = 0, INITVAL_1D = 0, INITVAL_1E = 0, INITVAL_1F = 0, INITVAL_20 = 0, INITVAL_21 = 0, INITVAL_22 = 0,
        INITVAL_23 = 0, INITVAL_24 = 0, INITVAL_25 = 0, INITVAL_26 = 0, INITVAL_27 = 0, INITVAL_28 = 0, INITVAL_29 = 0,
        INITVAL_2A = 0, INITVAL_2B = 0, INITVAL_2C = 0, INITVAL_2D = 0, INITVAL_2E = 0, INITVAL_2F = 0, INITVAL_30 = 0,
        INITVAL_31 = 0, INITVAL_32 = 0, INITVAL_33 = 0, INITVAL_34 = 0, INITVAL_35 = 0, INITVAL_36 = 0, INITVAL_37 = 0,
        INITVAL_38 = 0, INITVAL_39 = 0, INITVAL_3A = 0, INITVAL_3B = 0, INITVAL_3C = 0, INITVAL_3D = 0, INITVAL_3E = 0,
        INITVAL_3F = 0
) (
    input CLKA, CEA, OCEA, WEA, RSTA, CLKB, CEB, OCEB, WEB, RSTB,
    input CSA0, CSA1, CSA2, CSB0, CSB1, CSB2,
    input ADA0, ADA1, ADA2, ADA3, ADA4, ADA5, ADA6, ADA7, ADA8, ADA9, ADA10, ADA11, ADA12, ADA13,
    input ADB0, ADB1, ADB2, ADB3, ADB4, ADB5, ADB6, ADB7, ADB8, ADB9, ADB10, ADB11, ADB12, ADB13,
    input DIA0, DIA1, DIA2, DIA3, DIA4, DIA5, DIA6, DIA7, DIA8, DIA9, DIA10, DIA11, DIA12, DIA13, DIA14, DIA15,
    input DIA16, DIA17,
    output DOB0, DOB1, DOB2, DOB3, DOB4, DOB5, DOB6, DOB7, DOB8, DOB9, DOB10, DOB11, DOB12, DOB13, DOB14, DOB15,
    output DOB16, DOB17
);
    localparam LOW = DATA_WIDTH_A == 18 ? 4 : DATA_WIDTH_A == 9 ? 3 : DATA_WIDTH_A == 4 ? 2 : DATA_WIDTH_A == 2 ? 1 : 0;
    initial begin
        if (DATA_WIDTH_A != DATA_WIDTH_B
            || !(DATA_WIDTH_A == 1 || DATA_WIDTH_A == 2 || DATA_WIDTH_A == 4 || DATA_WIDTH_A == 9 || DATA_WIDTH_A == 18))
            $fatal(1, "DP16KD: only equal widths of 1, 2, 4, 9 or 18 bits are modelled");
        if (REGMODE_A != "NOREG" || REGMODE_B != "OUTREG")
            $fatal(1, "DP16KD: only the output register of port B is modelled");
        if (CSDECODE_A != "0b000" || CSDECODE_B != "0b000")
            $fatal(1, "DP16KD: only chip selects decoded as 000 are modelled");
        if (WRITEMODE_A != "NORMAL" || WRITEMODE_B != "NORMAL" || GSR != "DISABLED")
            $fatal(1, "DP16KD: only normal writes without GSR are modelled");
    end

    wire [13:0] ada = {ADA13, ADA12, ADA11, ADA10, ADA9, ADA8, ADA7, ADA6, ADA5, ADA4, ADA3, ADA2, ADA1, ADA0};
    wire [13:0] adb = {ADB13, ADB12, ADB11, ADB10, ADB9, ADB8, ADB7, ADB6, ADB5, ADB4, ADB3, ADB2, ADB1, ADB0};
    wire [17:0] dia = {DIA17, DIA16, DIA15, DIA14, DIA13, DIA12, DIA11, DIA10, DIA9, DIA8, DIA7, DIA6, DIA5, DIA4,
                       DIA3, DIA2, DIA1, DIA0};
    reg [17:0] words [0:(1 << (14 - LOW)) - 1];
    reg [17:0] read, dob;
    integer bit_, word;
    localparam [64 * 320 - 1:0] CONTENTS = {
        INITVAL_3F, INITVAL_3E, INITVAL_3D, INITVAL_3C, INITVAL_3B, INITVAL_3A, INITVAL_39, INITVAL_38, INITVAL_37,
        INITVAL_36, INITVAL_35, INITVAL_34, INITVAL_33, INITVAL_32, INITVAL_31, INITVAL_30, INITVAL_2F, INITVAL_2E,
        INITVAL_2D, INITVAL_2C, INITVAL_2B, INITVAL_2A, INITVAL_29, INITVAL_28, INITVAL_27, INITVAL_26, INITVAL_25,
        INITVAL_24, INITVAL_23, INITVAL_22, INITVAL_21, INITVAL_20, INITVAL_1F, INITVAL_1E, INITVAL_1D, INITVAL_1C,
        INITVAL_1B, INITVAL_1A, INITVAL_19, INITVAL_18, INITVAL_17, INITVAL_16, INITVAL_15, INITVAL_14, INITVAL_13,
        INITVAL_12, INITVAL_11, INITVAL_10, INITVAL_0F, INITVAL_0E, INITVAL_0D, INITVAL_0C, INITVAL_0B, INITVAL_0A,
        INITVAL_09, INITVAL_08, INITVAL_07, INITVAL_06, INITVAL_05, INITVAL_04, INITVAL_03, INITVAL_02, INITVAL_01,
        INITVAL_00
    };
    initial
        if (LOW == 4)
            for (word = 0; word < 1024; word = word + 1)
                words[word] = CONTENTS[320 * (word / 16) + 20 * (word % 16) +: 18];
        else if (CONTENTS != 0)
            $fatal(1, "DP16KD: contents are modelled with words of 18 bits only");
    always @(posedge CLKA) begin
        if (!CEA || CSA0 || CSA1 || CSA2 || RSTA)
            $fatal(1, "DP16KD: enable, select and reset of port A are modelled at rest only");
        if (WEA)
            for (bit_ = 0; bit_ < DATA_WIDTH_A; bit_ = bit_ + 1)
                if (DATA_WIDTH_A != 18 || ada[bit_ / 9])
                    words[ada >> LOW][bit_] <= dia[bit_];
    end
    always @(posedge CLKB) begin
        if (!CEB || !OCEB || WEB || CSB0 || CSB1 || CSB2 || RSTB)
            $fatal(1, "DP16KD: port B is modelled as a port that always reads");
        read <= words[adb >> LOW];
        dob <= read;
    end
    assign {DOB17, DOB16, DOB15, DOB14, DOB13, DOB12, DOB11, DOB10, DOB9, DOB8, DOB7, DOB6, DOB5, DOB4, DOB3, DOB2,
            DOB1, DOB0} = dob;
endmodule
