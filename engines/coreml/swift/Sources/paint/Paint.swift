import CoreML
import Foundation
import IntaglioPictures

let usage = """
    usage: paint PROMPT [--output FILE.png] [--seed N] [--width N] [--height N] [--steps N] [--guidance X]
                 [--negative-prompt TEXT] [--compute-units all|cpu|cpu+gpu|cpu+ne] [--settings picture.json]
    """

@main
struct Paint {
    static func main() async {
        do {
            try await paint(Array(CommandLine.arguments.dropFirst()))
        } catch {
            FileHandle.standardError.write(Data("\(error)\n".utf8))
            exit(1)
        }
    }

    private static func paint(_ arguments: [String]) async throws {
        var left = arguments[...]
        var prompt: String?
        var options = PictureOptions()
        var output = "picture.png"
        var settings = "picture.json"
        var units = MLComputeUnits.all
        while let argument = left.popFirst() {
            guard argument.hasPrefix("--") else {
                guard prompt == nil else { refuse("there are two prompts; put quotes around one") }
                prompt = argument
                continue
            }
            guard let value = left.popFirst() else { refuse("\(argument) needs a value") }
            switch argument {
            case "--output": output = value
            case "--settings": settings = value
            case "--seed": options.seed = number(value, argument) as UInt64
            case "--width": options.width = number(value, argument) as Int
            case "--height": options.height = number(value, argument) as Int
            case "--steps": options.steps = number(value, argument) as Int
            case "--guidance": options.guidance = number(value, argument) as Float
            case "--negative-prompt": options.negativePrompt = value
            case "--compute-units": units = computeUnits(value)
            default: refuse("\(argument) is unknown")
            }
        }
        guard let prompt else { refuse("the prompt is missing") }
        options.progress = { step, steps in
            FileHandle.standardError.write(Data("step \(step) of \(steps)\n".utf8))
        }
        let pipeline = try PicturePipeline(settings: URL(fileURLWithPath: settings), computeUnits: units)
        try await pipeline.paint(prompt, options: options).writePNG(to: URL(fileURLWithPath: output))
        print(output)
    }

    private static func number<Number: LosslessStringConvertible>(_ text: String, _ option: String) -> Number {
        guard let number = Number(text) else { refuse("\(option) \(text) is not a number that fits") }
        return number
    }

    private static func computeUnits(_ name: String) -> MLComputeUnits {
        switch name {
        case "all": return .all
        case "cpu": return .cpuOnly
        case "cpu+gpu": return .cpuAndGPU
        case "cpu+ne": return .cpuAndNeuralEngine
        default: refuse("--compute-units \(name) is unknown")
        }
    }

    private static func refuse(_ what: String) -> Never {
        FileHandle.standardError.write(Data("\(what)\n\(usage)\n".utf8))
        exit(2)
    }
}
