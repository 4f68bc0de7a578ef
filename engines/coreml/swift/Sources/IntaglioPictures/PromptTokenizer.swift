import Foundation
import Hub
import PictureMath
import Tokenizers

/// Prompts to token ids, padded to the length of the model's text.
struct PromptTokenizer {
    private let settings: PictureSettings.Prompt
    private let tokenizer: any Tokenizer

    /// Reads the bundle's tokenizer, and compares it with ids that the one of `intaglio` gave.
    init(_ settings: PictureSettings.Prompt, beside folder: URL) throws {
        var said: [String: Config] = ["tokenizer_class": Config(settings.kind)]
        if let unknown = settings.unknown {
            said["unk_token"] = Config(unknown)
        }
        let file = folder.appendingPathComponent(settings.tokenizer).standardizedFileURL
        let data = try HubApi.shared.configuration(fileURL: file)
        tokenizer = try AutoTokenizer.from(tokenizerConfig: Config(said), tokenizerData: data)
        self.settings = settings
        let found = ids(of: settings.probe.text)
        guard found == settings.probe.ids else {
            throw PictureError("the tokenizer gives \(found) for \"\(settings.probe.text)\", expected \(settings.probe.ids)")
        }
    }

    /// Ids and mask of a prompt, `[1, length]` each. Throws where it is too long.
    func encode(_ prompt: String) throws -> (ids: Tensor, mask: Tensor) {
        let found = ids(of: prompt)
        guard found.count <= settings.length else {
            throw PictureError("the prompt has \(found.count) tokens, and at most \(settings.length) fit; shorten it")
        }
        let padding = settings.length - found.count
        let padded = found.map { Int32($0) } + [Int32](repeating: settings.pad, count: padding)
        let mask = [Int32](repeating: 1, count: found.count) + [Int32](repeating: 0, count: padding)
        return (Tensor(padded, [1, settings.length]), Tensor(mask, [1, settings.length]))
    }

    private func ids(of prompt: String) -> [Int] {
        tokenizer.encode(text: settings.before + prompt + settings.after, addSpecialTokens: false)
    }
}
